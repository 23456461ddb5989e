"""Advantages: what an estimator says of a step's rewards, put on the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from respec.errors import ConfigError, RewardError
from respec.policy.estimators import ESTIMATORS, GROUP_RELATIVE
from respec.types import Sample, ScoredRollout


def advantages(scored: Sequence[ScoredRollout], estimator: str) -> tuple[Sample, ...]:
    """Gives every token that the policy drew its completion's advantage. Order is kept; groups may be of different sizes.

    Raises ConfigError for an unknown estimator or a group of one, RewardError for a reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"policy.estimator: there is no '{estimator}'; known: {', '.join(sorted(ESTIMATORS))}")
    for item in scored:
        if not np.isfinite(item.reward):
            raise RewardError(
                f"row {item.rollout.prompt.row}, sample {item.rollout.sample}: the reward is {item.reward}; a reward must be "
                "finite, give the reward function a fallback"
            )
    names = [(item.rollout.prompt.row, item.rollout.draw) for item in scored]
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    group_N = np.array([place[name] for name in names])
    alone = np.flatnonzero(np.bincount(group_N) == 1)
    if estimator in GROUP_RELATIVE and len(alone):
        raise ConfigError(
            f"row {list(place)[alone[0]][0]} has one sample, and estimator '{estimator}' compares the samples of a prompt; "
            "set rollout.group_size to 2 or more"
        )
    reward_N = np.array([item.reward for item in scored], dtype=np.float64)
    length_N = np.array([item.rollout.drawn for item in scored])
    advantage_N = ESTIMATORS[estimator](reward_N, group_N, length_N)
    return tuple(
        Sample(item, np.where(item.rollout.drawn_T, value, 0.0).astype(np.float32))
        for item, value in zip(scored, advantage_N, strict=True)
    )
