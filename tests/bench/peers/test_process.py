"""Workers seen from the benchmark: their answers, their faults, and that they hold still."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from respec.bench.peers.process import WORKERS, PeerKind, Worker, python_of, workers
from respec.errors import ConfigError

SCRIPT = f"""
import os, sys, threading
sys.path.insert(0, {str(WORKERS)!r})
from wire import serve

def echo(request):
    print("a library prints")
    os.system("echo a child prints")
    return {{"got": request["value"]}}

def fail(request):
    raise ValueError("no such model")

def die(request):
    print("the last words", file=sys.stderr, flush=True)
    os._exit(3)

def spin(request):
    def forever():
        while True: pass
    threading.Thread(target=forever, daemon=True).start()
    return {{}}

serve({{"echo": echo, "fail": fail, "die": die, "spin": spin}})
"""


@pytest.fixture
def worker(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    made = Worker("it", sys.executable, script, tmp_path / "it.log")
    yield made
    made.close()
    assert not made.family()


def test_answers_come_back_whatever_is_printed_between(worker: Worker):
    for value in ([1, 2], {"a": None}, "text\nwith lines"):
        assert worker.ask("echo", value=value) == {"got": value}


def test_an_error_is_told_with_the_log_and_the_worker_goes_on(worker: Worker):
    with pytest.raises(ConfigError, match=r"(?s)'it' failed at 'fail': ValueError: no such model.*Traceback"):
        worker.ask("fail")
    assert worker.ask("echo", value=1) == {"got": 1}


def test_a_death_is_told_with_the_last_words(worker: Worker):
    with pytest.raises(ConfigError, match=r"(?s)failed at 'die': its process has ended.*the last words"):
        worker.ask("die")


def test_a_worker_that_was_not_asked_uses_no_processor(worker: Worker):
    worker.ask("spin")

    def used() -> list[tuple[float, float]]:
        return [(t.user, t.system) for t in (process.cpu_times() for process in worker.family())]

    readings = [used()]
    for _ in range(4):
        # a turn of work on this side, in which a thread that spins would have had its share of the processor
        assert sum(range(10_000_000))
        readings.append(used())
    # a thread that waits for a processor stops when it gets one; the last turns see it at rest
    assert readings[-1] == readings[-2]
    assert {process.status() for process in worker.family()} == {"stopped"}


def test_a_peer_that_is_not_installed_is_refused_before_any_is_started(tmp_path: Path):
    with pytest.raises(ConfigError, match="make peers"):
        python_of(PeerKind("vllm", "vllm_worker.py", "bfloat16"), tmp_path)
    with pytest.raises(ConfigError, match="make peers"), workers({"x": PeerKind("x", "y.py", "z")}, tmp_path):
        pass
