"""A worker that crashes, hangs, talks nonsense or is not there ends in an error that says so, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.rollout.vllm.conftest import FAKE, START  # pyright: ignore[reportMissingImports]

from respec.errors import VllmError
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Ready
from respec.types import Sampling


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether the process is no more, or nobody's zombie, before long."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", r"ended its process \(exit code 7\)"),
        ("hangs", r"said nothing for 1 s and was ended; .*timeout_s"),
        ("garbles", "said what is not a message"),
        ("raises", "RuntimeError: out of blocks"),
    ],
)
def test_a_fault_is_an_error_with_the_end_of_the_log(engine, asks, fault, said):
    made = engine(fault, limit_s=1.0 if fault == "hangs" else 30.0)
    with pytest.raises(VllmError, match=f"(?s){said}.*the fake is drawing"):
        made.rollout(asks, Sampling(4))
    # only one that has said what failed goes on
    assert made._worker.alive == (fault == "raises")
    assert made._worker.folder.exists() == (fault == "raises")


def test_a_worker_that_is_gone_is_an_error_at_the_next_request(engine, asks):
    made = engine()
    made._worker.kill()
    with pytest.raises(VllmError, match="signal SIGKILL; the machine may have been out of memory"):
        made.rollout(asks, Sampling(4))


def test_an_interruption_ends_the_worker_and_what_it_has_started(fake):
    worker = fake("child")
    worker.ask(START, 60.0, Ready)
    child = int((worker.folder / "child").read_text())

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    worker._await = interrupted
    with pytest.raises(KeyboardInterrupt):
        worker.hear(1.0, Ready)
    assert not worker.alive and gone(child) and not worker.folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_a_parent_that_is_killed_takes_the_worker_with_it(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, 'tests/rollout/vllm')\n"
        "from respec.rollout.vllm.process import Worker\n"
        "from respec.rollout.vllm.worker.wire import Ready, Start\n"
        f"worker = Worker(sys.executable, Path({str(tmp_path / 'log')!r}), Path({str(FAKE)!r}), {{'FAKE': 'child'}})\n"
        f"worker.ask(Start(**{vars(START)!r}), 60.0, Ready)\n"
        "print(worker.pid, (worker.folder / 'child').read_text(), worker.folder, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, child, folder = parent.stdout.readline().split()
    os.kill(parent.pid, 9)
    parent.wait()
    assert gone(int(pid)) and gone(int(child)) and not Path(folder).exists()


def test_a_python_that_is_not_there_is_an_error_before_anything_is_started(tmp_path):
    with pytest.raises(VllmError, match=r"rollout\.vllm\.python: there is no '/nowhere/python'"):
        Worker("/nowhere/python", tmp_path / "log")
