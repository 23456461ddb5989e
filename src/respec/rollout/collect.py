"""Dynamic sampling: draws further groups until a step has as many as it wants, whatever of them a filter leaves.

What is drawn next depends on what was drawn before, never on how fast: groups are judged and kept in prompt order, the order in which
the walk through the data asked for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from respec.types import Ask, ScoredRollout

Group = tuple[ScoredRollout, ...]


class Draw(Protocol):
    """What one draw of prompts gave: at least its rollouts, scored."""

    @property
    def scored_R(self) -> Sequence[ScoredRollout]: ...


D = TypeVar("D", bound=Draw)


@dataclass(frozen=True)
class Collected(Generic[D]):
    """The draws of a step, and its groups in prompt order: all of them, and those that the filter left. `enough`: as many as were wanted."""

    draws: tuple[D, ...]
    groups: tuple[Group, ...]
    kept: tuple[Group, ...]
    enough: bool


def collect(
    ask: Callable[[int], Sequence[Ask]],
    draw: Callable[[Sequence[Ask]], D],
    keep: Callable[[Sequence[Group]], Sequence[bool]],
    missing: Callable[[Sequence[Group]], int],
    first: int,
    size: int,
    max_draws: int,
) -> Collected[D]:
    """Asks for `first` prompts and draws them; and for more while groups are missing, `max_draws` times in all.

    `ask(n)` gives the walk's next n asks; `keep` says which of all groups so far are learned from, `missing` how many are wanted beside
    those kept. A further draw asks for as many prompts as should do, by the share kept so far, at most `size`.
    """
    draws, groups, wanted = list[D](), list[Group](), first
    while True:
        asks = ask(wanted)
        draws.append(draw(asks))
        groups += in_prompt_order(asks, draws[-1].scored_R)
        kept = [group for group, stays in zip(groups, keep(groups), strict=True) if stays]
        lacking = missing(kept)
        if lacking <= 0 or len(draws) >= max_draws:
            return Collected(tuple(draws), tuple(groups), tuple(kept), lacking <= 0)
        wanted = min(size, math.ceil(lacking * len(groups) / max(1, len(kept))))


def in_prompt_order(asks: Sequence[Ask], scored: Sequence[ScoredRollout]) -> list[Group]:
    """The groups of rollouts in canonical order, in the order of the asks."""
    group_of = {key: tuple(members) for key, members in groupby(scored, key=lambda item: item.rollout.key[:2])}
    return [group_of[ask.prompt.row, ask.draw] for ask in asks]
