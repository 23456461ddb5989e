"""The residual field learns what the models miss, shares it with neighbours, tells machine from plan, and forgets."""

from __future__ import annotations

import numpy as np

from respec.speculation.residual import Residual
from respec.types import PLAIN, Plan

PLANS = (PLAIN, Plan("a", 2, 1, 2), Plan("a", 3, 1, 3), Plan("b", 2, 1, 2))


def taught(
    ratios: dict[int, float], active: int = 8, rounds: int = 200, noise: float = 0.05, seed: int = 0
) -> Residual:
    residual = Residual(PLANS, 64, 0.3, 20000.0, 0.05)
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        for plan, ratio in ratios.items():
            residual.observe(plan, active, ratio * (1 + noise * rng.standard_normal()), 0.0)
    return residual


def test_it_learns_the_ratio_and_how_surely():
    residual = taught({0: 1.0, 1: 1.3})
    factor, error = residual.at(8)
    assert abs(factor[1] / factor[0] - 1.3) < 0.04
    assert error[0] == 0.0
    assert error[1] < 0.03 < error[3]


def test_neighbours_learn_with_it_and_the_more_the_nearer():
    factor, _ = taught({0: 1.0, 1: 1.3}).at(8)
    assert 1.3 > factor[2] > 1.1  # the same drafter, one node more
    assert abs(factor[3] - 1) < 0.15  # another drafter
    near, far = taught({0: 1.0, 1: 1.3}).at(12)[0], taught({0: 1.0, 1: 1.3}).at(64)[0]
    assert 1.3 > near[1] > far[1] > 1.0


def test_a_slow_machine_is_not_held_against_a_plan():
    residual = taught({0: 0.7, 1: 0.7})
    factor, _ = residual.at(8)
    assert abs(factor[1] / factor[0] - 1) < 0.05
    assert factor[3] < 0.9  # nobody is spared


def test_it_measures_its_noise():
    assert 0.15 < taught({0: 1.0}, noise=0.2, rounds=600).noise < 0.25
    assert taught({0: 1.0}, noise=0.01, rounds=600).noise < 0.025


def test_one_hiccup_moves_it_little():
    residual = taught({0: 1.0, 1: 1.3})
    residual.observe(1, 8, 0.02, 0.0)
    assert residual.at(8)[0][1] > 1.25


def test_what_is_idle_becomes_uncertain_again():
    residual = taught({0: 1.0, 1: 1.3})
    factor, error = residual.at(8)
    residual.loosen(0.5)
    assert residual.at(8)[1][1] > 2 * error[1]
    assert 1.0 < residual.at(8)[0][1] < factor[1]
    residual.loosen(0.0)
    np.testing.assert_allclose(residual.at(8)[0], 1.0)
