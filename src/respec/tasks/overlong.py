"""A soft penalty on answers that come near the length limit, as one more part of the reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from respec.types import ScoredRollout

PART = "overlong"


def soft_overlong(length: int, longest: int, cache: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), lengths in tokens: 0 up to longest - cache, then down in a straight
    line to -1 at `longest`, and -1 beyond."""
    return max(-1.0, min(0.0, (longest - cache - length) / cache))


def penalized(
    scored: Iterable[ScoredRollout], longest: int, cache: int, weight: float = 1.0
) -> tuple[ScoredRollout, ...]:
    """The same rollouts with the penalty as the part `overlong`, `weight` times which is added to the reward. `cache` 0: as they are."""
    return tuple(_penalized(item, longest, cache, weight) if cache else item for item in scored)


def _penalized(item: ScoredRollout, longest: int, cache: int, weight: float) -> ScoredRollout:
    penalty = soft_overlong(len(item.rollout.token_T), longest, cache)
    return dataclasses.replace(item, reward=item.reward + weight * penalty, part={**item.part, PART: penalty})
