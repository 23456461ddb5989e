"""Advantages: what an estimator says of a step's rewards, put on the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float32, Float64

from respec.config import CriticConfig
from respec.errors import ConfigError, RewardError
from respec.policy.estimators import ESTIMATORS, GROUP_RELATIVE
from respec.policy.valued import VALUED, Course
from respec.types import Rollout, Sample, ScoredRollout

LEAST_VARIANCE = 1e-8


class Valuer(Protocol):
    """What the estimators of `valued.py` ask of a critic."""

    config: CriticConfig

    @property
    def alone(self) -> bool:
        """Whether the policy waits in this step."""
        ...

    def values(self, rollouts: Sequence[Rollout]) -> tuple[Float64[np.ndarray, "T+1"], ...]:
        """Of the states before each token, and of the one after the last."""
        ...

    def log_ratios(self, rollouts: Sequence[Rollout]) -> tuple[Float64[np.ndarray, "T"], ...]:
        """log(old / rollout) of each token."""
        ...


def advantages(scored: Sequence[ScoredRollout], estimator: str, critic: Valuer | None = None) -> tuple[Sample, ...]:
    """Gives every token that the policy drew its advantage. Order is kept; groups may be of different sizes.

    `critic` is asked by the estimators of `valued.py`, which need one. Raises ConfigError for an unknown estimator, a missing critic
    or a group of one that is to be compared within itself, RewardError for a reward that is not finite.
    """
    for item in scored:
        if not np.isfinite(item.reward):
            raise RewardError(
                f"row {item.rollout.prompt.row}, sample {item.rollout.sample}: the reward is {item.reward}; a reward must be "
                "finite, give the reward function a fallback"
            )
    if estimator in VALUED and critic is not None:
        return _by_critic(scored, estimator, critic)
    if estimator in VALUED:
        raise ConfigError(f"policy.estimator '{estimator}' needs a critic, and there is none here; choose one without")
    if estimator not in ESTIMATORS:
        known = ", ".join(sorted({**ESTIMATORS, **VALUED}))
        raise ConfigError(f"policy.estimator: there is no '{estimator}'; known: {known}")
    return _by_rewards(scored, estimator)


def _by_rewards(scored: Sequence[ScoredRollout], estimator: str) -> tuple[Sample, ...]:
    names = [(item.rollout.prompt.row, item.rollout.draw) for item in scored]
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    group_N = np.array([place[name] for name in names])
    alone = np.flatnonzero(np.bincount(group_N) == 1)
    if estimator in GROUP_RELATIVE and len(alone):
        raise ConfigError(
            f"row {list(place)[alone[0]][0]} has one sample, and estimator '{estimator}' compares the samples of a prompt; "
            "set rollout.group_size to 2 or more"
        )
    reward_N = np.array([_whole_reward(item) for item in scored], dtype=np.float64)
    length_N = np.array([item.rollout.drawn for item in scored])
    advantage_N = ESTIMATORS[estimator](reward_N, group_N, length_N)
    return tuple(
        Sample(item, np.where(item.rollout.drawn_T, value, 0.0).astype(np.float32))
        for item, value in zip(scored, advantage_N, strict=True)
    )


def _whole_reward(item: ScoredRollout) -> float:
    return (
        item.reward if item.token_reward_T is None else item.reward + float(item.token_reward_T.sum(dtype=np.float64))
    )


def _by_critic(scored: Sequence[ScoredRollout], estimator: str, critic: Valuer) -> tuple[Sample, ...]:
    """Samples with values and returns. While the policy waits its advantages are 0, from which it learns nothing."""
    config, rollouts = critic.config, [item.rollout for item in scored]
    reward_N = np.array([item.reward for item in scored], dtype=np.float64)
    if config.whiten_rewards:
        reward_N = _whitened(reward_N, reward_N)
    parts = zip(scored, reward_N, critic.values(rollouts), critic.log_ratios(rollouts), strict=True)
    course_N = [_course(*part, bootstrap=config.bootstrap_truncated) for part in parts]
    judged_N = [VALUED[estimator](course, config) for course in course_N]
    every = np.concatenate([judged.advantage_T for judged in judged_N])
    samples = []
    for item, course, judged in zip(scored, course_N, judged_N, strict=True):
        advantage_T = _whitened(judged.advantage_T, every) if config.whiten_advantages else judged.advantage_T
        advantage_T = np.zeros_like(advantage_T) if critic.alone else advantage_T
        learned, value_T, return_T = (
            _spread(part, item.rollout.drawn_T) for part in (advantage_T, course.value_T, judged.return_T)
        )
        samples.append(Sample(item, learned, value_T=value_T, return_T=return_T))
    return tuple(samples)


def _course(
    item: ScoredRollout,
    reward: float,
    value_T1: Float64[np.ndarray, "T+1"],
    log_ratio_T: Float64[np.ndarray, "T"],
    bootstrap: bool,
) -> Course:
    """The tokens that the policy drew. A completion's reward is earned by its last token, a turn's by the last of the turn, what is charged for a token by
    that one. What comes after a truncated one is worth nothing either, but with `bootstrap`."""
    rollout, drawn_T = item.rollout, item.rollout.drawn_T
    reward_T = np.zeros(len(drawn_T)) if item.token_reward_T is None else item.token_reward_T.astype(np.float64)
    if rollout.turn_T is not None and rollout.turn_reward_K is not None:
        for turn, earned in enumerate(rollout.turn_reward_K):
            reward_T[np.flatnonzero(rollout.turn_T == turn)[-1]] += earned
        reward -= float(rollout.turn_reward_K.sum())
    reward_T[np.flatnonzero(drawn_T)[-1:]] += reward
    turn_T = rollout.turn_T[drawn_T] if rollout.turn_T is not None else None
    after = float(value_T1[-1]) if bootstrap and rollout.truncated else 0.0
    return Course(reward_T[drawn_T], value_T1[:-1][drawn_T], after, log_ratio_T[drawn_T], turn_T)


def _spread(part: Float64[np.ndarray, "D"], drawn_T: Bool[np.ndarray, "T"]) -> Float32[np.ndarray, "T"]:
    """Values of drawn tokens at their places among all tokens; 0 at the others."""
    whole_T = np.zeros(len(drawn_T), np.float32)
    whole_T[drawn_T] = part
    return whole_T


def _whitened(part: Float64[np.ndarray, "T"], every: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "T"]:
    """Less the mean of `every`, over its deviation."""
    return (part - every.mean()) / np.sqrt(max(every.var(), LEAST_VARIANCE))
