"""Every test draws from one seed, which the header prints; ATTNFOLD_SEED=N repeats a run."""

import os
import sys
import time

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
SEED = int(os.environ.get("ATTNFOLD_SEED", time.time_ns() % 2**32))


def pytest_report_header():
    return f"ATTNFOLD_SEED={SEED}"


def pytest_configure(config):
    config.addinivalue_line("markers", "full: minutes long, or needs packages that only ./test --full installs")


@pytest.fixture
def rng(request):
    name = request.node.nodeid.encode()
    return np.random.default_rng([SEED, *name])
