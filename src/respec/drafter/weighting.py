"""How much each rollout counts in the drafter's loss: Σ w_i Σ_t D / Σ w_i |y_i|. All weights have mean 1 before the cap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

CAP = 10.0


def uniform(
    reward_R: Float64[np.ndarray, "R"], lowest: float, advantage_R: Float64[np.ndarray, "R"]
) -> Float64[np.ndarray, "R"]:
    """All alike."""
    return np.ones(len(reward_R))


def by_reward(
    reward_R: Float64[np.ndarray, "R"], lowest: float, advantage_R: Float64[np.ndarray, "R"]
) -> Float64[np.ndarray, "R"]:
    """w = min(c, (r - r_min) / mean(r - r_min)): ReSpec's w = r (Chen et al. 2025, arXiv 2510.26475), well defined for any reward."""
    return _mean_one(reward_R - lowest)


def by_rank(
    reward_R: Float64[np.ndarray, "R"], lowest: float, advantage_R: Float64[np.ndarray, "R"]
) -> Float64[np.ndarray, "R"]:
    """The mean rank among all rewards (ties share theirs), the lowest counting 1."""
    _, place, count = np.unique(reward_R, return_inverse=True, return_counts=True)
    return _mean_one((np.cumsum(count) - (count - 1) / 2.0)[place])


def by_advantage(
    reward_R: Float64[np.ndarray, "R"], lowest: float, advantage_R: Float64[np.ndarray, "R"]
) -> Float64[np.ndarray, "R"]:
    """The positive part of the advantage."""
    return _mean_one(np.maximum(advantage_R, 0.0))


WEIGHTINGS: dict[str, Callable[..., Float64[np.ndarray, "R"]]] = {
    "uniform": uniform, "reward": by_reward, "rank": by_rank, "advantage+": by_advantage,
}  # fmt: skip


def weigh(
    name: str, reward_R: Float64[np.ndarray, "R"], lowest: float, advantage_R: Float64[np.ndarray, "R"]
) -> tuple[Float64[np.ndarray, "R"], bool]:
    """Weights by name, and whether they are uniform because the rewards (or advantages) do not tell the rollouts apart."""
    told_apart = np.ptp(advantage_R if name == "advantage+" else reward_R) > 0 if len(reward_R) else False
    if name == "uniform" or not told_apart:
        return np.ones(len(reward_R)), name != "uniform"
    return WEIGHTINGS[name](reward_R, lowest, advantage_R), False


def _mean_one(value_R: Float64[np.ndarray, "R"]) -> Float64[np.ndarray, "R"]:
    mean = value_R.mean()
    return np.minimum(CAP, value_R / mean) if mean > 0 else np.ones(len(value_R))
