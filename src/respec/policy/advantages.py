"""Advantages: how much better a completion was than the others of its group (same prompt row, same draw).

Sources: DeepSeekMath (GRPO, arXiv 2402.03300, section 4.1.2), Dr. GRPO (arXiv 2503.20783, section 3.2), RLOO (Ahmadian et al.
2024, arXiv 2402.14740, equation 5). Every estimator sums to zero over a group, and is exactly zero on equal rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from respec.errors import ConfigError, RewardError
from respec.types import Sample, ScoredRollout

Estimator = Callable[[Float64[np.ndarray, "G"]], Float64[np.ndarray, "G"]]

STD_EPSILON = 1e-4


def group(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """GRPO: (r - mean) / (std + 1e-4), std the sample deviation (divisor G - 1, as in TRL and verl)."""
    centred_G = group_without_std(reward_G)
    return centred_G / (reward_G.std(ddof=1) + STD_EPSILON)


def group_without_std(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """Dr. GRPO: r - mean, so that easy and hard prompts weigh by their spread."""
    # The mean of equal numbers need not equal them in floating point, but equal rewards must teach exactly nothing.
    if reward_G.min() == reward_G.max():
        return np.zeros_like(reward_G)
    return reward_G - reward_G.mean()


def leave_one_out(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """RLOO: r minus the mean of the other G - 1, which is (r - mean) * G / (G - 1)."""
    return group_without_std(reward_G) * len(reward_G) / (len(reward_G) - 1)


ESTIMATORS: dict[str, Estimator] = {
    "group": group,
    "group_without_std": group_without_std,
    "leave_one_out": leave_one_out,
}


def advantages(scored: Sequence[ScoredRollout], estimator: str) -> tuple[Sample, ...]:
    """Gives every token of a completion its advantage. Order is kept; groups may be of different sizes.

    Raises ConfigError for an unknown estimator or a group of one, RewardError for a reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"policy.estimator: there is no '{estimator}'; known: {', '.join(sorted(ESTIMATORS))}")
    members: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(scored):
        if not np.isfinite(item.reward):
            raise RewardError(
                f"row {item.rollout.prompt.row}, sample {item.rollout.sample}: the reward is {item.reward}; a reward must be "
                "finite, give the reward function a fallback"
            )
        members.setdefault((item.rollout.prompt.row, item.rollout.draw), []).append(index)
    advantage = np.zeros(len(scored))
    for (row, _), indices in members.items():
        if len(indices) == 1:
            raise ConfigError(
                f"row {row} has one sample, and estimator '{estimator}' compares the samples of a prompt; "
                "set rollout.group_size to 2 or more"
            )
        advantage[indices] = ESTIMATORS[estimator](np.array([scored[i].reward for i in indices], dtype=np.float64))
    return tuple(
        Sample(item, np.full(len(item.rollout.token_T), value, dtype=np.float32))
        for item, value in zip(scored, advantage, strict=True)
    )
