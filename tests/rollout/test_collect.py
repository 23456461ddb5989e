"""Dynamic sampling: groups in prompt order whatever order they finish in, no more draws than needed or allowed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from respec.rollout.collect import Collected, Group, collect
from respec.types import Ask, Prompt, Rollout, ScoredRollout, Stream

NOTHING = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Draw:
    scored_R: tuple[ScoredRollout, ...]


def ask_of(place: int) -> Ask:
    """The rows of a walk in which prompt order is not canonical order: row 40 - place."""
    return Ask(Prompt(40 - place, "", (1,)), Stream.TRAIN, 0, 2)


def rollout(ask: Ask, sample: int) -> Rollout:
    whole = NOTHING.astype(np.int32)
    return Rollout(
        ask.prompt, ask.stream, ask.draw, sample, whole, NOTHING, NOTHING, NOTHING, whole, NOTHING.astype(np.uint8), whole, "", "eos"
    )  # fmt: skip


def draw(asks: Sequence[Ask]) -> Draw:
    scored = [ScoredRollout(rollout(ask, sample), 0.0, {}) for ask in asks for sample in range(ask.group)]
    random.Random(len(asks)).shuffle(scored)  # as they finish
    return Draw(tuple(sorted(scored, key=lambda item: item.rollout.key)))  # as the engine hands them on


def run(good: Callable[[int], bool], wanted: int, size: int, max_draws: int) -> tuple[Collected[Draw], list[int]]:
    """Walks on from place 0; the group at a place is learned from if it is `good`. Also the sizes of the draws."""
    sizes = list[int]()

    def ask(count: int) -> list[Ask]:
        first = sum(sizes)
        sizes.append(count)
        return [ask_of(place) for place in range(first, first + count)]

    def keep(groups: Sequence[Group]) -> list[bool]:
        return [good(40 - group[0].rollout.prompt.row) for group in groups]

    return collect(ask, draw, keep, lambda kept: wanted - len(kept), size, size, max_draws), sizes


def places(groups: Sequence[Group]) -> list[int]:
    return [40 - group[0].rollout.prompt.row for group in groups]


def test_groups_are_kept_in_prompt_order_and_whole() -> None:
    found, sizes = run(lambda place: place % 3 != 0, wanted=4, size=4, max_draws=9)
    # of 0 1 2 3 two are good; the two missing should need four more
    assert sizes == [4, 4] and found.enough
    assert places(found.groups) == list(range(8)) and places(found.kept) == [1, 2, 4, 5, 7]
    assert all([item.rollout.sample for item in group] == [0, 1] for group in found.groups)
    assert len(found.draws) == 2


def test_a_further_draw_is_as_large_as_it_should_have_to_be() -> None:
    assert run(lambda place: place != 0, wanted=8, size=8, max_draws=9)[1] == [8, 2]
    assert run(lambda place: place > 8, wanted=4, size=8, max_draws=9)[1] == [8, 8]
    assert run(lambda place: True, wanted=4, size=4, max_draws=9)[1] == [4]


@pytest.mark.parametrize("most", [1, 3])
def test_draws_are_bounded(most: int) -> None:
    found, sizes = run(lambda place: place == 2, wanted=4, size=4, max_draws=most)
    assert len(sizes) == most and not found.enough and places(found.kept) == [2]
