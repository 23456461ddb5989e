"""Bi-level advantages: first over an episode's turns, then over the tokens of each."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int

from respec.types import ENVIRONMENT


def bi_level_gae(
    reward_K: Float64[np.ndarray, "K"],
    value_T: Float64[np.ndarray, "T"],
    turn_T: Int[np.ndarray, "T"],
    turn_gamma: float,
    turn_lam: float,
    gamma: float,
    lam: float,
    after: float = 0.0,
) -> Float64[np.ndarray, "T"]:
    """Bi-level GAE (VAGEN-Full, arXiv 2510.16907; RAGEN's option of the same name): what each token of an episode's turns was worth.

    `reward_K` is what each turn earned, `value_T` what a critic expected before each token, `turn_T` as in `Rollout`. V_k is the value before
    the last token of turn k, `after` that of the state behind the last turn, 0 where the episode ended.

    Turns:  A_k = d_k + turn_gamma turn_lam A_{k+1},  d_k = r_k + turn_gamma V_{k+1} - V_k.
    Tokens: the last of turn k has A_k; before it, A_t = d_t + gamma lam A_{t+1}, d_t = gamma V_{t+1} - V_t, over the turn's own tokens.

    What the environment said has 0, and stands between no two tokens of a turn. A critic is to learn advantage + value at drawn tokens.
    """
    last_K = np.array([np.flatnonzero(turn_T == k)[-1] for k in range(len(reward_K))], int)
    ahead_K = np.append(value_T[last_K], after)[1:]
    advantage_T = np.zeros(len(value_T))
    later = 0.0
    for k in reversed(range(len(reward_K))):
        later = reward_K[k] + turn_gamma * ahead_K[k] - value_T[last_K[k]] + turn_gamma * turn_lam * later
        advantage_T[last_K[k]] = later
        for t in reversed(np.flatnonzero(turn_T == k)[:-1]):
            advantage_T[t] = gamma * value_T[t + 1] - value_T[t] + gamma * lam * advantage_T[t + 1]
    return np.where(turn_T == ENVIRONMENT, 0.0, advantage_T)
