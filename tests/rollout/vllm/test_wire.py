"""The messages between respec and a vLLM worker: what is sent is what is read, and nothing else is read."""

from __future__ import annotations

import ast
import sys

import pytest

from respec.rollout.vllm.process import SCRIPT
from respec.rollout.vllm.worker.wire import (
    Asked,
    Completion,
    Depth,
    Draw,
    Drawn,
    Failed,
    Held,
    Push,
    Ready,
    Round,
    Start,
    WireError,
    from_line,
    to_line,
)

MESSAGES = [
    Start("m", 0, "bfloat16", 64, 8, 0, 2, 1, 0.4, False, True, {"method": "ngram", "num_speculative_tokens": 4}, True),
    Push("/w", 3),
    Push("/w", 2, True),
    Held(3, 2),
    Draw(3, 2, [Asked([1, 2], 4, 1.0, 2**63 - 1), Asked([3], 5, 0.0, 0)], ["\n"], [0], 4),
    Depth(2),
    Ready({"vllm": "0.32.0"}, "cpu", True, False, ["temperatures"]),
    Round(2, 1, 3, 5, [2, 1], [1, 0], 0.01, 12.5, False),
    Drawn(3, 2, [Completion([1, 2], [-0.1, -2.0], [0.3, 0.4], [0, 1], [False, True])], 3),
    Failed("RuntimeError", 'a "quoted"\nline'),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_from_its_one_line(message):
    line = to_line(message)
    assert line.count("\n") == 1 and line.endswith("\n")
    assert from_line(line) == message


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        '{"is": "Nobody"}',
        '{"is": "Depth"}',
        '{"is": "Depth", "depth": 1, "more": 2}',
        '{"depth": 1}',
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(WireError):
        from_line(line)


def test_the_worker_needs_nothing_of_respec_and_no_more_than_vllm_brings():
    """Its environment has vLLM, torch and safetensors, and need not have respec, numpy aside."""
    allowed = set(sys.stdlib_module_names) | {"vllm", "torch", "safetensors", "wire", "inside", "drafts"}
    for path in SCRIPT.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
