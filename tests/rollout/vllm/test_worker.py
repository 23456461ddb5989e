"""What the worker takes from vLLM's output, and what it refuses there."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from respec.rollout.vllm.process import SCRIPT


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's own file, which finds its neighbours by bare names."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    for name in ("main", "wire"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("main")


def output(logprob: float, rank: int) -> Any:
    """A step's output of one sequence: tokens 5 and 6, both alike."""
    at = SimpleNamespace(logprob=logprob, rank=rank)
    return SimpleNamespace(request_id="1", outputs=[SimpleNamespace(token_ids=[5, 6], logprobs=[{5: at}, {6: at}])])


def test_a_steps_tokens_are_taken_over_with_their_entropies_and_all_but_the_last_were_drafts(worker):
    made = {"1": worker.Completion([], [], [], [], [])}
    assert worker._take(made, output(-0.5, -1 - 250_000), 3) == 2
    assert made["1"] == worker.Completion([5, 6], [-0.5, -0.5], [0.25, 0.25], [3, 3], [True, False])


@pytest.mark.parametrize(("logprob", "rank", "said"), [(float("nan"), 7, "gives as nan"), (-0.5, 1, "gave a rank")])
def test_a_log_probability_that_is_no_number_is_told_from_a_sampler_that_tells_no_entropies(
    worker, logprob, rank, said
):
    with pytest.raises(RuntimeError, match=said):
        worker._take({"1": worker.Completion([], [], [], [], [])}, output(logprob, rank), 0)
