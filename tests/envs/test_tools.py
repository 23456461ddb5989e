"""Tools: only those named, by JSON, under a time limit; every fault is a text, and none ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from respec.envs.tools import HOW, ToolEnv
from respec.errors import TaskError

MODULE = """
import os, time

def ask(seed): return f"What is {seed} + 1?", str(seed + 1)
def add(a, b): return a + b
def slow(): time.sleep(60)
def gone(): os._exit(3)
def loud(): print("hello"); return "said"
def odd(): return {1, 2}
def secret(): return "no"
def long(): return "x" * 500
def bad(seed): return 3
"""
TOOLS = tuple(f"tools_of_a_test:{name}" for name in ("add", "slow", "gone", "loud", "odd", "long"))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tools")
    (folder / "tools_of_a_test.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        made = ToolEnv("tools_of_a_test:ask", TOOLS, limit_s=1.0, longest=100)
        yield made
        made._process.close()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('Let me see. <tool>add({"a": 2, "b": 3})</tool>', "5"),
        ('<tool>add({"a": "x", "b": "y"})', '"xy"'),
        ("<tool>loud()</tool>", '"said"'),
        ("<tool>add(2, 3)</tool>", "error: the arguments are not JSON: Extra data at character 2"),
        ("<tool>add([2, 3])</tool>", "error: the arguments must be a JSON object, by name"),
        ('<tool>add({"a": 2})</tool>', "error: TypeError: add() missing 1 required positional argument: 'b'"),
        (
            '<tool>add({"a": 2, "b": "x"})</tool>',
            "error: TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        ),
        ("<tool>secret()</tool>", "error: there is no tool 'secret'; there are add, slow, gone, loud, odd, long"),
        ("<tool>odd()</tool>", "error: TypeError: Object of type set is not JSON serializable"),
        ("<tool>slow()</tool>", "error: it took more than 1 s"),
        ("<tool>gone()</tool>", "error: it ended its process (status 3)"),
        ("<tool>long()</tool>", '"' + "x" * 99 + " ... (cut)"),
        ("", HOW),
        ("<tool>add</tool>", HOW),
    ],
)
def test_a_call_is_answered_whatever_it_is(env, written, read):
    assert env.reset(4).startswith("What is 4 + 1?\nTools: add, slow")
    assert env.step(written) == (read, 0.0, False)
    assert env.step('<tool>add({"a": 1, "b": 1})</tool>') == ("2", 0.0, False)


def test_an_answer_ends_it(env):
    env.reset(4)
    assert env.step("<answer> 5 </answer>") == ("right", 1.0, True) and env.solved
    env.reset(4)
    assert env.step("so <answer>6") == ("wrong", 0.0, True) and not env.solved


def test_functions_that_are_not_there_or_do_not_ask_are_refused(env):
    with pytest.raises(TaskError, match="No module named 'nowhere'"):
        ToolEnv("tools_of_a_test:ask", ["nowhere:f"])
    with pytest.raises(TaskError, match=r"gave 3 for seed 1; it must return \(question, answer\)"):
        ToolEnv("tools_of_a_test:bad", TOOLS[:1]).reset(1)
