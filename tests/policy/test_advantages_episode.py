"""A critic's estimators on an episode: each turn's reward at its last drawn token, what the environment said left out, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from respec.config import CriticConfig
from respec.policy.advantages import advantages
from respec.types import ENVIRONMENT, Rollout, ScoredRollout

TURN_T = np.array([0, 0, ENVIRONMENT, ENVIRONMENT, 1, 1, 1], np.int32)
VALUE_T1 = np.array([0.1, 0.2, 9.0, 9.0, 0.3, 0.4, 0.5, 7.0])


class Values:
    """A critic that expects what VALUE_T1 says."""

    config = CriticConfig(gamma=1.0, lam=1.0, whiten_advantages=False)
    alone = False

    def values(self, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, ...]:
        return tuple(VALUE_T1 for _ in rollouts)

    def log_ratios(self, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(len(rollout.token_T)) for rollout in rollouts)


@pytest.mark.parametrize("charge", [None, -0.25])
def test_what_is_to_come_less_what_was_expected(make_rollout, charge):
    """At gamma and lambda 1 the advantage is the rewards from a token on, less its value: 1 of turn 0 and 2 of turn 1, and charges."""
    rollout = dataclasses.replace(make_rollout(0, 0, 7), turn_T=TURN_T, turn_reward_K=np.array([1.0, 2.0]), solved=True)
    charges = None if charge is None else np.where(TURN_T == ENVIRONMENT, 0.0, charge).astype(np.float32)
    (sample,) = advantages([ScoredRollout(rollout, 3.0, {}, token_reward_T=charges)], "gae", Values())
    to_come = np.array([3, 3, 0, 0, 2, 2, 2]) + (charge or 0.0) * np.array([5, 4, 0, 0, 3, 2, 1])
    drawn = TURN_T != ENVIRONMENT
    assert sample.advantage_T == pytest.approx(np.where(drawn, to_come - VALUE_T1[:-1], 0.0), abs=1e-6)
    assert sample.return_T == pytest.approx(np.where(drawn, to_come, 0.0), abs=1e-6)
    assert sample.value_T == pytest.approx(np.where(drawn, VALUE_T1[:-1], 0.0), abs=1e-6)
