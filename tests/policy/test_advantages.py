"""Advantages: golden numbers, law 6, and every refusal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from respec.errors import ConfigError, RewardError
from respec.policy.advantages import advantages
from respec.policy.estimators import ESTIMATORS, GROUP_RELATIVE
from respec.types import Rollout, ScoredRollout


def scored(make_rollout: Callable[..., Rollout], rewards: list[list[float]]) -> list[ScoredRollout]:
    return [
        ScoredRollout(make_rollout(row, k, 2 + k), reward, {})
        for row, group in enumerate(rewards)
        for k, reward in enumerate(group)
    ]


def firsts(items: tuple) -> list[float]:
    return [float(item.advantage_T[0]) for item in items]


def test_golden_numbers(make_rollout) -> None:
    # Rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(1/3).
    items = scored(make_rollout, [[1.0, 0.0, 0.0, 1.0]])
    high = 0.5 / ((1 / 3) ** 0.5 + 1e-4)
    np.testing.assert_allclose(firsts(advantages(items, "group")), [high, -high, -high, high], rtol=1e-6)
    np.testing.assert_allclose(firsts(advantages(items, "group_without_std")), [0.5, -0.5, -0.5, 0.5], rtol=1e-6)
    # Each against the mean of the other three: 1 - 1/3, 0 - 2/3.
    np.testing.assert_allclose(firsts(advantages(items, "leave_one_out")), [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-6)


def test_one_value_a_token_and_order_kept(make_rollout) -> None:
    items = scored(make_rollout, [[0.1, 0.9, 0.4], [0.3, 0.2, 0.7]])
    shuffled = [items[i] for i in (3, 0, 5, 1, 4, 2)]
    result = advantages(shuffled, "group")
    assert [item.scored for item in result] == shuffled
    by_key = {item.scored.rollout.key: item for item in advantages(items, "group")}
    for item in result:
        assert item.advantage_T.shape == item.scored.rollout.token_T.shape
        np.testing.assert_array_equal(item.advantage_T, by_key[item.scored.rollout.key].advantage_T)


def test_golden_numbers_of_whitening_over_the_steps_tokens(make_rollout) -> None:
    # Lengths 2, 3, 2, 3: rewards 1, 0, 0.5, 0.5 have the mean (2 + 1 + 1.5) / 10 = 0.45 a token.
    items = scored(make_rollout, [[1.0, 0.0], [0.5, 0.5]])
    std = ((2 * 0.55**2 + 3 * 0.45**2 + 5 * 0.05**2) / 10) ** 0.5
    expected = [0.55 / std, -0.45 / std, 0.05 / std, 0.05 / std]
    np.testing.assert_allclose(firsts(advantages(items, "batch_whitened")), expected, rtol=1e-6)
    # Less their group's mean: 0.5, -0.5, 0, 0, whose mean square is 5 * 0.25 / 10 a token.
    expected = [0.5 / 0.125**0.5, -0.5 / 0.125**0.5, 0.0, 0.0]
    np.testing.assert_allclose(firsts(advantages(items, "group_centred_batch_whitened")), expected, rtol=1e-6)
    # A single completion a prompt will do.
    assert firsts(advantages(scored(make_rollout, [[1.0], [0.0]]), "batch_whitened"))[0] == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
def test_law_6_a_group_sums_to_zero(make_rollout, estimator: str) -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 17):
        reward_G, other_G = rng.random(size), rng.random(size)
        group_N, length_N = np.repeat([0, 1], size), np.ones(2 * size, int)
        advantage_N = ESTIMATORS[estimator](np.concatenate([reward_G, other_G]), group_N, length_N)
        assert abs(advantage_N[:size].sum()) < 1e-12 * size / (reward_G.std() + 1e-4)


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
def test_law_6_equal_rewards_give_exactly_zero(make_rollout, estimator: str) -> None:
    # 0.1 is one of the numbers whose floating-point mean over three differs from it.
    assert np.mean([0.1, 0.1, 0.1]) != 0.1
    for reward in (0.1, 0.0, 1.0, 1e9, 0.7):
        result = advantages(scored(make_rollout, [[reward] * 3, [0.0, 1.0, 0.5]]), estimator)
        assert all((item.advantage_T == 0.0).all() for item in result[:3])
        assert any((item.advantage_T != 0.0).any() for item in result[3:])


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_a_step_of_equal_rewards_teaches_exactly_nothing(make_rollout, estimator: str) -> None:
    result = advantages(scored(make_rollout, [[0.1] * 3, [0.1] * 3]), estimator)
    assert all((item.advantage_T == 0.0).all() for item in result)


def test_draws_of_one_row_are_groups_of_their_own(make_rollout) -> None:
    import dataclasses

    items = scored(make_rollout, [[1.0, 0.0]])
    second = [dataclasses.replace(s, reward=0.5, rollout=dataclasses.replace(s.rollout, draw=1)) for s in items]
    assert firsts(advantages(items + second, "group_without_std")) == [0.5, -0.5, 0.0, 0.0]


def test_refusals(make_rollout) -> None:
    with pytest.raises(ConfigError, match="no 'gea'; known: batch_whitened, bi_level_gae, gae, group,"):
        advantages(scored(make_rollout, [[1.0, 0.0]]), "gea")
    for estimator in GROUP_RELATIVE:
        with pytest.raises(ConfigError, match="row 0 has one sample"):
            advantages(scored(make_rollout, [[1.0]]), estimator)
    with pytest.raises(RewardError, match="row 0, sample 1: the reward is nan"):
        advantages(scored(make_rollout, [[1.0, float("nan")]]), "group")
