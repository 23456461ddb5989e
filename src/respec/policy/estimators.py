"""How much better a completion was than what was to be expected: pure functions of one step's rewards.

`reward_N` has the step's completions in canonical order, `group_N` says whose prompt and draw each belongs to, `length_N` how many tokens
it has. What is returned is one number a completion, which every token of it gets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int

Estimator = Callable[[Float64[np.ndarray, "N"], Int[np.ndarray, "N"], Int[np.ndarray, "N"]], Float64[np.ndarray, "N"]]

STD_EPSILON = 1e-4
LEAST_VARIANCE = 1e-8


def group(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """GRPO: (r - mean) / (std + 1e-4), std the sample deviation (divisor G - 1, as in TRL and verl). DeepSeekMath, arXiv 2402.03300, 4.1.2."""
    return group_without_std(reward_G) / (reward_G.std(ddof=1) + STD_EPSILON)


def group_without_std(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): r - mean, so that easy and hard prompts weigh by their spread."""
    # The mean of equal numbers need not equal them in floating point, but equal rewards must teach exactly nothing.
    if reward_G.min() == reward_G.max():
        return np.zeros_like(reward_G)
    return reward_G - reward_G.mean()


def leave_one_out(reward_G: Float64[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740, equation 5): r minus the mean of the other G - 1, which is (r - mean) G / (G - 1)."""
    return group_without_std(reward_G) * len(reward_G) / (len(reward_G) - 1)


def within_groups(estimate: Callable[[Float64[np.ndarray, "G"]], Float64[np.ndarray, "G"]]) -> Estimator:
    """An estimator that sees one group at a time."""

    def over_all(
        reward_N: Float64[np.ndarray, "N"], group_N: Int[np.ndarray, "N"], length_N: Int[np.ndarray, "N"]
    ) -> Float64[np.ndarray, "N"]:
        advantage_N = np.zeros_like(reward_N)
        for name in np.unique(group_N):
            members = group_N == name
            advantage_N[members] = estimate(reward_N[members])
        return advantage_N

    return over_all


def batch_whitened(
    reward_N: Float64[np.ndarray, "N"], group_N: Int[np.ndarray, "N"], length_N: Int[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    """REINFORCE++ (arXiv 2501.03262, equation 10): (r - mean) / std over the tokens of the whole step, without critic or group.

    Mean and deviation are over tokens, as in its authors' OpenRLHF: a completion counts as often as it has tokens.
    """
    if reward_N.min() == reward_N.max():
        return np.zeros_like(reward_N)
    centred_N = reward_N - (length_N * reward_N).sum() / length_N.sum()
    return _scaled(centred_N, length_N)


def group_centred_batch_whitened(
    reward_N: Float64[np.ndarray, "N"], group_N: Int[np.ndarray, "N"], length_N: Int[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    """REINFORCE++-baseline (arXiv 2501.03262, equation 11): r minus its group's mean, over the deviation of that over the step's tokens.

    The mean over the step is 0 by then, completion by completion; that over tokens is not taken off again, so that a group of equal
    rewards still teaches nothing.
    """
    return _scaled(within_groups(group_without_std)(reward_N, group_N, length_N), length_N)


def _scaled(centred_N: Float64[np.ndarray, "N"], length_N: Int[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Over the root of the mean square, a completion counted as often as it has tokens."""
    return centred_N / np.sqrt(max((length_N * centred_N**2).sum() / length_N.sum(), LEAST_VARIANCE))


GROUP_RELATIVE: dict[str, Estimator] = {
    "group": within_groups(group),
    "group_without_std": within_groups(group_without_std),
    "leave_one_out": within_groups(leave_one_out),
    "group_centred_batch_whitened": group_centred_batch_whitened,
}
ESTIMATORS: dict[str, Estimator] = {**GROUP_RELATIVE, "batch_whitened": batch_whitened}
