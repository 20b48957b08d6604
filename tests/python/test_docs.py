"""What the documentation shows runs; what is public is documented and typed; stubs stand beside the modules."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import attnfold
import attnfold.call_file
import attnfold.torch
import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULES = ["attnfold", "attnfold._attention", "attnfold._cache", "attnfold._plan", "attnfold._state", "attnfold.call_file",
           "attnfold.torch"]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0


def public():
    for name in attnfold.__all__:
        thing = getattr(attnfold, name)
        if getattr(thing, "__module__", "").startswith("attnfold"):
            yield name, thing
    yield "Plan.update", attnfold.Plan.update
    yield "Plan.run", attnfold.Plan.run
    yield "call_file.save", attnfold.call_file.save
    yield "call_file.load", attnfold.call_file.load
    yield "torch.handle", attnfold.torch.handle


def test_every_public_function_says_what_it_takes_raises_and_shows():
    without = {"kernels", "data_pointer", "handle", "State", "Plan"}
    for name, thing in public():
        text = inspect.getdoc(thing) or ""
        if name != "Plan":
            assert ">>>" in text, name
        if name.rpartition(".")[2] not in without:
            assert "Raises:" in text and "Args:" in text, name
            signature = inspect.signature(thing)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for p in signature.parameters.values():
                assert p.name == "self" or p.annotation is not inspect.Signature.empty, (name, p.name)
                family = {"sparse_block_size", "sparse_local_blocks", "sparse_vertical_stride", "sparse_head_step",
                          "head_dim_qk", "head_dim_vo", "self"}  # fmt: skip
                assert p.name in family or re.search(rf"\b{p.name}\b", text.partition("Args:")[2]), (name, p.name)


def test_the_package_is_typed():
    folder = pathlib.Path(attnfold.__file__).parent
    assert (folder / "py.typed").exists()
    stub = ast.parse((folder / "_core.pyi").read_text())
    names = {n.name for n in stub.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert {"Plan", "append", "merge", "new_dlpack"} <= names


def snippets(path):
    """The Python blocks of a text."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.mark.parametrize("path", ["README.md", "docs/call-format.md", "docs/python.md"])
def test_snippets_run(path, tmp_path):
    # The others run in test_transformers.py and test_vllm.py.
    blocks = [b for b in snippets(ROOT / path) if "transformers" not in b and "vllm" not in b]
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, block + done.stderr
