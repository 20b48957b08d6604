"""Threads at once, and processes forked from them: first uses, reports beside updates, locks that a child inherits."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import attnfold
import numpy as np
import pytest

SOURCES = pathlib.Path(__file__).parents[2] / "python" / "src"
FIRST_USE = """
import faulthandler, sys, threading
import attnfold, numpy as np
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-6)
class Mine(np.ndarray): pass
x, i = np.ones((3, 1, 64), np.float32).view(Mine), np.arange(2, dtype=np.int32).view(Mine)
class Lends:
    shape, dtype = x.shape, x.dtype
    def __dlpack__(self, **how): return np.asarray(x).__dlpack__(**how)
    def __dlpack_device__(self): return np.asarray(x).__dlpack_device__()
calls = dict(
    attention=lambda: attnfold.attention(x, x, x), lent=lambda: attnfold.attention(x, Lends(), Lends()),
    data_pointer=lambda: attnfold.data_pointer(x), merge=lambda: attnfold.merge([(x, x[..., 0])]),
    slots=lambda: attnfold.slot_mapping(i, i[1:], i[None], page_size=2, num_pages=2),
    scale=lambda: attnfold._core.number_of("x", np.float32(1)),
)
call, errors, together = calls[sys.argv[1]], [], threading.Barrier(4)
def work():
    together.wait()
    try: call()
    except BaseException as error: errors.append(error)
threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
"""


@pytest.mark.parametrize("call", ["attention", "lent", "data_pointer", "merge", "slots", "scale"])
def test_first_uses_in_several_threads_do_not_wait_for_each_other(call):
    done = subprocess.run([sys.executable, "-c", FIRST_USE, call], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_static_of_the_extension_is_initialised_by_python_code():
    for path in sorted(SOURCES.glob("*.cpp")):
        for initialised in re.findall(r"\bstatic\b[^;(){}]*?(?:=|\{)[^;]*;", path.read_text()):
            assert not re.search(r"import_|attr\(|nb::|Py\w+_\w+\(", initialised), f"{path.name}: {initialised}"


def plan(**more):
    problem = dict(qo_heads=4, kv_heads=2, head_dim=64, dtype="float32", num_pages=64, max_batch=2, max_qo_rows=8,
                   max_kv_len=1024, num_threads=1)  # fmt: skip
    return attnfold.create(**(problem | more))


TABLE = np.arange(64, dtype=np.int32).reshape(1, 64)
STEPS = (([0, 5], [1000], TABLE), ([0, 1, 2], [70, 40], TABLE.reshape(2, 32)))


def at_work(*bodies):
    """Repeats each body in a thread of its own; what it returns ends them."""
    stop, threads = threading.Event(), []

    def repeat(body):
        while not stop.is_set():
            body()

    for body in bodies:
        threads.append(threading.Thread(target=repeat, args=(body,)))
        threads[-1].start()

    def end():
        stop.set()
        for thread in threads:
            thread.join()

    return end


def test_a_report_beside_updates_is_of_one_schedule():
    p = plan()
    reports = []
    for step in STEPS:
        p.update(*step)
        reports.append(p.report())
    assert reports[0] != reports[1]
    end = at_work(lambda: [p.update(*step) for step in STEPS])
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert p.report() in reports
    finally:
        end()


def exit_status(body):
    """Of a forked child that runs `body`: 0 if it returns true; it is ended if it hangs."""
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            signal.alarm(20)
            good = body()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("parent", ["run", "update", "report"])
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(rng, parent):
    p = plan()
    pages = rng.standard_normal((64, 16, 2, 64), np.float32)
    q = rng.standard_normal((5, 4, 64), np.float32)
    p.update(*STEPS[0])
    expected = p.run(q, pages, pages)
    work = dict(run=lambda: p.run(q, pages, pages), update=lambda: p.update(*STEPS[0]), report=p.report)[parent]
    # A schedule that the parent was about to change is refused until the child has one of its own.
    torn = "expected an update in this process, which was forked while another thread updated the plan"

    def right():
        return np.array_equal(p.run(q, pages, pages), expected) and p.report()["num_requests"] == 1

    def right_or_refused():
        try:
            return right()
        except RuntimeError as error:
            return parent == "update" and torn in str(error)

    def right_after_an_update():
        p.update(*STEPS[0])
        return right()

    end = at_work(work, work)
    try:
        for _ in range(15):
            assert exit_status(right_or_refused) == 0
            assert exit_status(right_after_an_update) == 0
    finally:
        end()
    assert right()
