"""The law of DAS with its ceiling: its budgets are the best of all, and its depths near them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from das import budgets, depths, rollout_seconds, saving
from scipy.optimize import fminbound
from test_solver import known, load

from respec.speculation.cost_model import CostModel
from respec.types import PLAIN, Plan


@pytest.mark.parametrize("ceiling", [0.5, 0.8, 1.0])
def test_budgets_minimise_the_time_of_the_rollout(ceiling: float):
    rng = np.random.default_rng(0)
    for _ in range(20):
        length, efficiency = rng.lognormal(4, 1, 6), float(rng.uniform(0.5, 2))
        base_s, node_s = 0.02, float(10 ** rng.uniform(-4, -2))
        rounds, budget = budgets(length, ceiling, efficiency, base_s, node_s)
        # the budgets end all requests in that many rounds
        left = length - ceiling * length * (1 - np.exp(-efficiency * budget / length))
        assert left.max() == pytest.approx(rounds)

        def seconds(n: float, ceiling: float = ceiling, length: np.ndarray = length, e: float = efficiency) -> float:
            saved = np.maximum(length - n, 0) / (ceiling * length)
            return base_s * n - node_s * float((length / e * np.log(1 - saved)).sum())  # noqa: B023

        low = (1 - ceiling) * length.max()
        grid = np.linspace(low, length.max(), 2_001)[1:]
        best = min(seconds(n) for n in grid)
        refined = seconds(float(np.asarray(fminbound(seconds, low + 1e-9, length.max()))))
        assert seconds(rounds) <= min(best, refined) * (1 + 1e-9)


def test_the_closed_form_holds_at_a_ceiling_of_one_only():
    length = np.array([100.0, 120.0, 150.0])
    printed = 0.002 * length.sum() / (1.5 * 0.02)
    rounds, budget = budgets(length, 1.0, 1.5, 0.02, 0.002)
    assert rounds == pytest.approx(printed)
    np.testing.assert_allclose(budget, -length / 1.5 * np.log(rounds / length))
    # with a ceiling of 0.6 it would ask for fewer rounds than any budget can buy
    assert budgets(length, 0.6, 1.5, 0.02, 0.002)[0] > 0.4 * 150 > printed


@pytest.mark.parametrize("a", [0.4, 0.6, 0.8])
def test_depths_by_request_come_near_the_best_of_all_assignments(a: float):
    _, acceptance, _ = known({"a": a}, available=1.0)
    plan, excess, uniform = Plan("a", 5, 1, 5), [], []
    outlook = acceptance.outlook("a", 1, np.ones(8))
    rng = np.random.default_rng(1)
    for _ in range(25):
        length = np.sort(rng.lognormal(4, 1, 5)).round() + 6
        node_s = float(10 ** rng.uniform(-4, -2))
        cost = CostModel((), (0.02, 0.0, node_s, 0.0, 0.0), (0.0, 0.0, 0.0))
        found = depths(load(5, tuple(map(int, length))), plan, acceptance, cost, margin=0.0)
        assert list(found) == sorted(found)  # the longer, the deeper

        def seconds(depth: tuple[int, ...], node_s: float = node_s, length: np.ndarray = length) -> float:
            return rollout_seconds(np.array(depth), length, outlook, 0.02, node_s)

        best = min(map(seconds, itertools.product(range(6), repeat=5)))
        excess.append(seconds(found) / best - 1)
        uniform.append(min(seconds((d,) * 5) for d in range(6)) / best - 1)
    assert np.mean(excess) < 0.015
    assert np.max(excess) < 0.1
    assert np.mean(excess) < np.mean(uniform) / 2


def test_depths_are_the_plans_where_slots_are_refilled_and_end_with_the_budget():
    _, acceptance, _ = known({"a": 0.7})
    cost, plan = CostModel((), (0.02, 0.0, 2e-3, 0.0, 0.0), (0.0, 0.0, 0.0)), Plan("a", 4, 1, 4)
    assert depths(load(3, (10, 20, 300), waiting=5), plan, acceptance, cost) == (4, 4, 4)
    assert len(set(depths(load(3, (100, 100, 100)), plan, acceptance, cost))) == 1
    assert depths(load(3, (1, 3, 300), waiting=5), plan, acceptance, cost) == (0, 2, 4)
    assert depths(load(3, (10, 20, 300)), PLAIN, acceptance, cost) == (0, 0, 0)
    # two short requests are not worth telling apart from a long one, many are
    assert depths(load(3, (10, 20, 300)), plan, acceptance, cost) == (4, 4, 4)
    many = depths(load(31, (*[60] * 30, 300)), plan, acceptance, cost)
    assert many[0] < many[-1]


def test_the_law_of_saving_fits_geometric_acceptance():
    for a in (0.3, 0.6, 0.85):
        _, acceptance, _ = known({"a": a}, available=1.0)
        outlook = acceptance.outlook("a", 1, np.ones(8))
        ceiling, efficiency = saving(outlook)
        assert ceiling == pytest.approx(a, abs=0.03)
        x = outlook.nodes_S / outlook.tokens_S
        np.testing.assert_allclose(ceiling * (1 - np.exp(-efficiency * x)), 1 - 1 / outlook.tokens_S, atol=0.08)
