"""The soft overlong penalty: the paper's numbers, and its place among a rollout's rewards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from respec.tasks.overlong import penalized, soft_overlong
from respec.types import Prompt, Rollout, ScoredRollout, Stream


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (30000, -1.0)],
)
def test_golden_numbers_of_the_papers_setting(length: int, penalty: float) -> None:
    # DAPO: 20480 tokens at most, of which 4096 are the punished interval.
    assert soft_overlong(length, 20480, 4096) == penalty


def scored(length: int) -> ScoredRollout:
    nothing = np.zeros(length, np.float32)
    rollout = Rollout(
        Prompt(0, "", (1,)), Stream.TRAIN, 0, 0, nothing.astype(np.int32), nothing, nothing, nothing, nothing.astype(np.int32),
        nothing.astype(np.uint8), nothing.astype(np.int32), "", "eos",
    )  # fmt: skip
    return ScoredRollout(rollout, 1.0, {"task": 1.0})


def test_the_penalty_is_a_part_of_its_own() -> None:
    items = [scored(length) for length in (5, 9, 10)]
    result = penalized(items, longest=10, cache=4, weight=0.5)
    assert [item.part for item in result] == [{"task": 1.0, "overlong": p} for p in (0.0, -0.75, -1.0)]
    assert [item.reward for item in result] == [1.0, 1.0 - 0.375, 0.5]
    assert items[1].part == {"task": 1.0}, "the rollout it was made of stays as it is"


def test_without_a_cache_nothing_changes() -> None:
    items = (scored(5), dataclasses.replace(scored(9), reward=0.0))
    assert penalized(items, longest=10, cache=0) == items
