"""Which of a step's groups are learned from: pure functions of their rewards, in prompt order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

# 7 % of 100 groups are 7, of which floating point makes a little more.
ROUNDING = 1e-9

Rewards = Float64[np.ndarray, "G"]


@dataclass(frozen=True)
class Filter:
    """`keep(rewards by group, share)` says which groups stay; `redraws`: others are drawn in place of those that do not."""

    keep: Callable[[Sequence[Rewards], float], Bool[np.ndarray, "P"]]
    redraws: bool


def every_group(reward_PG: Sequence[Rewards], share: float) -> Bool[np.ndarray, "P"]:
    """All of them."""
    return np.ones(len(reward_PG), bool)


def with_spread(reward_PG: Sequence[Rewards], share: float) -> Bool[np.ndarray, "P"]:
    """Groups whose rewards are not all equal (DAPO, arXiv 2503.14476, equation 11): the others' advantages are 0."""
    return np.array([np.ptp(reward_G) != 0 for reward_G in reward_PG], bool)


def of_most_spread(reward_PG: Sequence[Rewards], share: float) -> Bool[np.ndarray, "P"]:
    """The `share` of the groups, rounded up, whose rewards deviate most; of equal ones the earlier (StarPO-S, arXiv 2504.20073)."""
    # equal rewards deviate by exactly nothing, though their mean need not be one of them in floating point
    deviation_P = np.array([reward_G.std() * (np.ptp(reward_G) != 0) for reward_G in reward_PG])
    kept = math.ceil(share * len(reward_PG) - ROUNDING)
    return np.isin(np.arange(len(reward_PG)), np.argsort(-deviation_P, kind="stable")[:kept])


FILTERS: dict[str, Filter] = {
    "none": Filter(every_group, redraws=False),
    "spread": Filter(with_spread, redraws=True),
    "top_spread": Filter(of_most_spread, redraws=False),
}
