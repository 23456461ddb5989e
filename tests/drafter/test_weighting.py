"""Reward weights: mean one before the cap, by their definitions, and uniform (and said so) where rewards say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from respec.drafter.weighting import CAP, WEIGHTINGS, weigh

REWARD, ADVANTAGE = np.array([0.0, 1.0, 1.0, 0.5]), np.array([-1.0, 0.5, 0.5, 0.0])


def weights(name: str, reward=REWARD, lowest: float = 0.0, advantage=ADVANTAGE) -> np.ndarray:
    return weigh(name, reward, lowest, advantage)[0]


def test_each_weighting_is_its_definition():
    assert weights("uniform").tolist() == [1, 1, 1, 1]
    assert weights("reward") == pytest.approx(REWARD / REWARD.mean())
    assert weights("reward", lowest=-1.0) == pytest.approx((REWARD + 1) / (REWARD + 1).mean())
    # ranks 1, 3.5, 3.5, 2
    assert weights("rank") == pytest.approx(np.array([1, 3.5, 3.5, 2]) / 2.5)
    assert weights("advantage+") == pytest.approx([0, 2, 2, 0])


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_where_nothing_tells_rollouts_apart_all_count_alike(name: str):
    alike = np.full(3, 0.7)
    values, fell_back = weigh(name, alike, 0.0, np.zeros(3))
    assert values.tolist() == [1, 1, 1] and fell_back == (name != "uniform")
    assert not weigh(name, REWARD, 0.0, ADVANTAGE)[1]
    assert len(weights(name, np.zeros(0), 0.0, np.zeros(0))) == 0


def test_a_lucky_one_among_many_does_not_drown_the_rest():
    reward = np.zeros(100)
    reward[3] = 1.0
    assert weights("reward", reward, 0.0, reward)[3] == CAP
