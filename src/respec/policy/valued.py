"""How much better a token was than what the critic expected: pure functions of one completion's rewards and values.

An estimator here sees one completion as a `Course` of steps, the tokens of it, and says of each its advantage and the return that the critic is to
learn. Beside `estimators.py`, whose functions see a whole step's rewards and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from respec.config import CriticConfig
from respec.policy.bilevel import bi_level_gae

Steps = Float64[np.ndarray, "T"]


@dataclass(frozen=True)
class Course:
    """What happened along one completion, step by step.

    `reward_T` is what a step earned, `value_T` what the critic expected before it. `after` is the value of the state after the last step: 0
    where the completion ended there. `log_ratio_T` is log(old / rollout): 0 where the policy that sampled is the one that learns. `turn_T`: the turn
    of an episode that a step was in; None where completions are not episodes.
    """

    reward_T: Steps
    value_T: Steps
    after: float
    log_ratio_T: Steps
    turn_T: Int[np.ndarray, "T"] | None = None


@dataclass(frozen=True)
class Judged:
    """A course's advantages, and the returns that its values should have been."""

    advantage_T: Steps
    return_T: Steps


def gae(course: Course, gamma: float, lam: float) -> Steps:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16):

    A_t = δ_t + γλ A_{t+1},  δ_t = r_t + γ V_{t+1} - V_t.
    """
    delta_T = course.reward_T + gamma * _next(course.value_T, course.after) - course.value_T
    return _swept(delta_T, np.full_like(delta_T, gamma * lam))


def vtrace(course: Course, gamma: float, lam: float, rho_clip: float, c_clip: float) -> Judged:
    """V-trace (IMPALA, Espeholt et al. 2018, arXiv 1802.01561, section 4.1, equation 1 and remarks 1 and 2), on n steps to the end:

    v_s - V_s = δ_s + γ c_s (v_{s+1} - V_{s+1}),  δ_s = ρ_s (r_s + γ V_{s+1} - V_s),  ρ = min(rho_clip, old / rollout),
    c = λ min(c_clip, old / rollout). The advantage is ρ_s (r_s + γ v_{s+1} - V_s), the return v_s. A step may be a token, or a
    turn whose log-ratio is the sum of its tokens'.
    """
    ratio_T = np.exp(course.log_ratio_T)
    rho_T, c_T = np.minimum(ratio_T, rho_clip), lam * np.minimum(ratio_T, c_clip)
    delta_T = rho_T * (course.reward_T + gamma * _next(course.value_T, course.after) - course.value_T)
    return_T = course.value_T + _swept(delta_T, gamma * c_T)
    gained_T = course.reward_T + gamma * _next(return_T, course.after) - course.value_T
    return Judged(rho_T * gained_T, return_T)


def _next(value_T: Steps, after: float) -> Steps:
    return np.append(value_T, after)[1:]


def _swept(delta_T: Steps, keep_T: Steps) -> Steps:
    """x_t = delta_t + keep_t x_{t+1}, from the last step back; x is 0 after it."""
    swept_T, later = np.empty_like(delta_T), 0.0
    for t in reversed(range(len(delta_T))):
        swept_T[t] = later = delta_T[t] + keep_T[t] * later
    return swept_T


def _gae(course: Course, config: CriticConfig) -> Judged:
    return _decoupled(course, config, lambda lam: gae(course, config.gamma, lam))


def _vtrace(course: Course, config: CriticConfig) -> Judged:
    return vtrace(course, config.gamma, config.lam, config.rho_clip, config.c_clip)


def _bi_level(course: Course, config: CriticConfig) -> Judged:
    turn_T = np.zeros(len(course.reward_T), np.int64) if course.turn_T is None else course.turn_T
    reward_K = np.bincount(turn_T, course.reward_T)

    def estimate(lam: float) -> Steps:
        turns, tokens = (config.turn_gamma, config.turn_lam), (config.gamma, lam)
        return bi_level_gae(reward_K, course.value_T, turn_T, *turns, *tokens, course.after)

    return _decoupled(course, config, estimate)


def _decoupled(course: Course, config: CriticConfig, estimate: Callable[[float], Steps]) -> Judged:
    """With another λ over tokens for the critic's targets than for the advantages: decoupled GAE (VC-PPO, arXiv 2503.01491)."""
    return_lam = config.lam if config.return_lam is None else config.return_lam
    return Judged(estimate(config.lam), course.value_T + estimate(return_lam))


VALUED: dict[str, Callable[[Course, CriticConfig], Judged]] = {
    "gae": _gae,
    "vtrace": _vtrace,
    "bi_level_gae": _bi_level,
}
# Those that read `log_ratio_T`, for which the policy is asked once more; they weigh a token for it themselves.
OFF_POLICY = {"vtrace"}
