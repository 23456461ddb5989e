from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from respec.config import RewardConfig
from respec.errors import RewardError
from respec.tasks.process import WorkerLost, WorkerProcess
from respec.tasks.reward import RewardWorker

# What goes wrong is what the completion says.
REWARDS = """
import os, signal, time
from respec.errors import RewardError

def obey(completions, **kwargs):
    values = []
    for text in completions:
        if text.startswith("raise"):
            raise ValueError("bad " + text)
        if text.startswith("exit"):
            os._exit(7)
        if text.startswith("leave"):
            raise SystemExit(2)
        if text.startswith("segfault"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if text.startswith("hang"):
            open("hanging", "w").close()
        while text.startswith("hang"):
            time.sleep(60)
        values.append(float("nan") if text == "nan" else 10**400 if text == "inf" else "1" if text == "word"
                      else [1.0] if text == "list" else True if text == "true" else float(len(text)))
    if "short" in completions:
        values.pop()
    return {"scores": values} if "dict" in completions else values

class Mine(RewardError):
    pass

def ours(completions, **kwargs):
    if "ours" in completions:
        raise RewardError("of our own kind")
    if "mine" in completions:
        raise Mine("of a kind derived from ours")
    return [1.0 for _ in completions]

def spread(completions, **kwargs):
    if "raise" in completions:
        raise ValueError("no")
    return [float(len(completions)) for _ in completions]

def alone(completions, **kwargs):
    if len(completions) > 1:
        raise RuntimeError("one at a time")
    return [1.0]

def slow(completions, **kwargs):
    time.sleep(0.4 * len(completions))
    return [1.0 for _ in completions]

def parent(completions, **kwargs):
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
"""

FAILURES = {
    "raise": r"raised ValueError: bad raise \(rewards.py, line 9\)",
    "exit": r"ended its process \(exit code 7\)",
    "leave": r"raised SystemExit: 2 \(rewards.py, line 13\)",
    "segfault": r"ended its process \(signal SIGSEGV\)",
    "hang": r"ran over its time limit of 1 s",
    "nan": r"returned nan",
    "inf": r"returned inf",
    "word": r"returned '1' of type str, not a number",
    "list": r"returned \[1.0\] of type list, not a number",
    "dict": r"returned a dict, not a list of numbers",
}


@pytest.fixture(autouse=True)
def rewards(here: Path) -> Path:
    (here / "rewards.py").write_text(REWARDS)
    return here


def run(make: Any, *texts: str, fn: str = "obey", timeout_s: float = 1.0, fallback: float | None = None) -> Any:
    prompt = make.prompt(5)
    config = RewardConfig(fn=f"rewards:{fn}", timeout_s=timeout_s, fallback=fallback)
    with RewardWorker(make.task(prompt), (config,)) as worker:
        scored = worker.score([make.rollout(prompt, text, sample=i, draw=2) for i, text in enumerate(texts)])
        after = worker.score([make.rollout(prompt, "fine")])
    if fn == "obey":
        assert after[0].reward == 4.0 and not after[0].fell_back, "the worker goes on, or is started anew"
    return scored


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_names_the_function_and_the_sample(make: Any, failure: str):
    with pytest.raises(
        RewardError,
        match=rf"reward 'rewards:obey' {FAILURES[failure]} on row 5, draw 2, sample 2, completion '{failure}'.*fallback",
    ):
        run(make, "a", "bb", failure, "cccc")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_fallback_value_takes_the_place_of_the_failed_sample_alone(make: Any, failure: str):
    scored = run(make, "a", "bb", failure, "cccc", fallback=-0.5)
    assert [item.reward for item in scored] == [1.0, 2.0, -0.5, 4.0]
    assert [item.part["rewards:obey"] for item in scored] == [1.0, 2.0, -0.5, 4.0]
    assert [item.fell_back for item in scored] == [(), (), ("rewards:obey",), ()]


@pytest.mark.parametrize(("text", "message"), [("ours", "raised RewardError: of"), ("mine", "raised Mine: of")])
def test_an_error_of_our_own_kinds_is_a_failure_like_any_other(make: Any, text: str, message: str):
    with pytest.raises(RewardError, match=rf"reward 'rewards:ours' {message}.* on row 5, draw 2, sample 1"):
        run(make, "a", text, fn="ours")
    assert [item.reward for item in run(make, "a", text, fn="ours", fallback=-1.0)] == [1.0, -1.0]


@pytest.mark.parametrize("fn", ["task", "math"])
def test_built_in_values_stand_alone_where_the_whole_batch_is_too_slow(
    make: Any, monkeypatch: pytest.MonkeyPatch, fn: str
):
    # As when math-verify takes its own limit over each of some hostile completions: together they pass the call's.
    ask = WorkerProcess.ask

    def slow_together(self: WorkerProcess, kind: str, payload: Any, limit_s: float) -> Any:
        if kind == "score" and len(payload[1]) > 1:
            self.kill()
            raise WorkerLost("ran over its time limit", hung=True)
        return ask(self, kind, payload, limit_s)

    monkeypatch.setattr(WorkerProcess, "ask", slow_together)
    prompt = make.prompt(0, answer="3")
    with RewardWorker(make.task(prompt), (RewardConfig(fn=fn),)) as worker:
        scored = worker.score([make.rollout(prompt, text, sample=i) for i, text in enumerate(("4", "3", "five"))])
    assert [(item.reward, item.fell_back) for item in scored] == [(0.0, ()), (1.0, ()), (0.0, ())]


def test_several_failures_of_several_kinds(make: Any):
    scored = run(make, "raise", "bb", "exit", "nan", "hang", "dd", fallback=0.0)
    assert [bool(item.fell_back) for item in scored] == [True, False, True, True, True, False]
    assert [item.reward for item in scored] == [0.0, 2.0, 0.0, 0.0, 0.0, 2.0]


def test_bools_are_numbers(make: Any):
    assert run(make, "true")[0].reward == 1.0


def test_a_single_failing_completion(make: Any):
    with pytest.raises(RewardError, match=r"ran over its time limit of 1 s on row 5, draw 2, sample 0"):
        run(make, "hang")
    assert run(make, "hang", fallback=3.0)[0].reward == 3.0


def test_a_long_completion_is_cut_in_the_message(make: Any):
    with pytest.raises(RewardError, match=r"completion 'raisexxx") as caught:
        run(make, "raise" + "x" * 500, "b")
    assert "x" * 75 + "'..." in str(caught.value).split("completion ")[1]


def test_wrong_length_is_the_batchs_fault_when_each_alone_passes(make: Any):
    with pytest.raises(RewardError, match=r"returned 2 values for 3 completions|returned 0 values for 1"):
        run(make, "a", "short", "b")
    scored = run(make, "a", "short", "b", fallback=9.0)
    assert [item.reward for item in scored] == [1.0, 9.0, 1.0]


def test_a_batch_that_fails_though_each_completion_passes(make: Any):
    with pytest.raises(
        RewardError,
        match=r"raised RuntimeError: one at a time .* on the 3 completions that begin with row 5.*each.*alone",
    ):
        run(make, "a", "b", "c", fn="alone")
    scored = run(make, "a", "b", "c", fn="alone", fallback=0.5)
    assert [(item.reward, len(item.fell_back)) for item in scored] == [(0.5, 1)] * 3


def test_a_slow_batch_asks_for_a_longer_limit(make: Any):
    with pytest.raises(RewardError, match=r"limit of 1 s on the 3 completions .*raise timeout_s"):
        run(make, "a", "b", "c", fn="slow")


def test_the_rest_is_scored_together_again(make: Any):
    scored = run(make, "a", "raise", "b", fn="spread", fallback=0.0)
    assert [item.reward for item in scored] == [2.0, 0.0, 2.0], "functions may compare the completions they are given"


def test_hanging_everywhere_ends_in_bounded_time(make: Any):
    scored = run(make, *["hang"] * 40, timeout_s=0.5, fallback=0.0)
    assert all(item.fell_back for item in scored)


def test_only_the_failing_function_falls_back(make: Any):
    prompt = make.prompt(0)
    configs = (RewardConfig(fn="rewards:obey", fallback=0.0), RewardConfig(fn="rewards:spread", weight=3.0))
    with RewardWorker(make.task(prompt), configs) as worker:
        scored = worker.score([make.rollout(prompt, text, sample=i) for i, text in enumerate(("exit", "bb"))])
    assert [item.part for item in scored] == [
        {"rewards:obey": 0.0, "rewards:spread": 2.0},
        {"rewards:obey": 2.0, "rewards:spread": 2.0},
    ]
    assert [item.fell_back for item in scored] == [("rewards:obey",), ()]


def test_a_worker_lost_between_two_calls_is_started_again(make: Any):
    prompt = make.prompt(0)
    with RewardWorker(make.task(prompt), (RewardConfig(fn="rewards:obey"),)) as worker:
        assert worker._process is not None
        os.kill(worker._process._process.pid, signal.SIGKILL)
        worker._process._process.wait()
        assert worker.score([make.rollout(prompt, "abc")])[0].reward == 3.0


def test_children_of_a_hanging_reward_go_with_it(make: Any, rewards: Path):
    with pytest.raises(RewardError, match="time limit"):
        run(make, "a", fn="parent", timeout_s=2.0)
    assert _gone(int((rewards / "child").read_text()))


DRIVER = """
import signal, sys, time
# as in a terminal: started in the background, a program is told to ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
from conftest import make_prompt, make_rollout, make_task
from respec.config import RewardConfig
from respec.tasks.reward import RewardWorker
prompt = make_prompt(0)
worker = RewardWorker(make_task(prompt), (RewardConfig(fn="rewards:obey", timeout_s=60),)).__enter__()
print(worker._process._process.pid, flush=True)
{then}
"""


def _drive(then: str) -> tuple[subprocess.Popen[str], int]:
    """A program that has a reward worker and then does something; with the worker's process id. Without a main guard."""
    code = DRIVER.format(tests=str(Path(__file__).parent), then=then)
    Path("driver.py").write_text(code)
    program = subprocess.Popen(
        [sys.executable, "driver.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    return program, int(program.stdout.readline())


def _soon(true: Callable[[], bool]) -> bool:
    """Waits for something to be so."""
    for _ in range(1200):
        if true():
            return True
        time.sleep(0.05)
    return False


def _gone(pid: int) -> bool:
    """Waits for a process to end; a zombie has ended."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if (
                Path(f"/proc/{pid}/stat").exists()
                and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            ):
                return True
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_parent_that_ends_without_closing_takes_the_worker_along():
    program, worker = _drive("")
    assert program.wait(60) == 0
    assert _gone(worker)


def test_a_killed_parent_takes_even_a_hanging_worker_along():
    program, worker = _drive("worker.score([make_rollout(prompt, 'hang')])")
    program.kill()
    program.wait()
    assert _gone(worker)


def test_ctrl_c_ends_quietly_in_the_worker():
    program, worker = _drive("worker.score([make_rollout(prompt, 'hang')])")
    # not before it waits for an answer: Python drops a KeyboardInterrupt that falls into a callback of an import
    assert _soon(Path("hanging").exists)
    os.kill(worker, signal.SIGINT)  # first, while it is sure to be there
    os.killpg(program.pid, signal.SIGINT)  # what a terminal does: every process of the group
    _, errors = program.communicate(timeout=60)
    assert errors.count("Traceback (most recent call last)") == errors.count("\nKeyboardInterrupt") == 1, errors
    assert _gone(worker)
