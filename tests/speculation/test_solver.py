"""The solver is pure, weighs tokens against seconds as stated, and prefers plain decoding when nothing beats it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import fminbound
from simulator import CONTEXT, Machine

from respec.speculation.acceptance import Acceptance
from respec.speculation.cost_model import CostModel, fit
from respec.speculation.depth import budgets, depths, rollout_seconds, saving
from respec.speculation.solver import goodput, solve
from respec.types import PLAIN, Load, Plan, RoundRecord

DEPTHS = (1, 2, 4, 7)


def known(accept: dict[str, float], available: float = 0.95) -> tuple[Machine, Acceptance, CostModel]:
    """A machine, and models that have seen it long."""
    machine = Machine({name: lambda round, a=a: a for name, a in accept.items()}, 0, DEPTHS, available)
    acceptance = Acceptance(8, sequences=1e9, rounds=1e9, idle=1e9)
    for name in accept:
        for _ in range(40):
            acceptance.observe(machine.run(512, Plan(name, 7, 1, 7), 0))
    return machine, acceptance, fit(machine.profile())


def load(active: int, remaining: tuple[int, ...] = (), waiting: int = 0) -> Load:
    return Load(active, waiting, CONTEXT, remaining)


@pytest.mark.parametrize("active", [1, 3, 8, 20, 64])
def test_goodput_is_that_of_the_machine(active: int):
    machine, acceptance, cost = known({"a": 0.7, "b": 0.3})
    for plan in machine.plans:
        # 20,000 sequences at depth 1: half a percent of error; the bend of the machine between the model's knots: a few
        assert goodput(plan, load(active), acceptance, cost) == pytest.approx(machine.rate(active, plan, 0), rel=0.06)


def test_goodput_of_plain_decoding_is_batch_over_seconds():
    cost = CostModel((), (0.01, 0.0, 0.001, 0.0, 0.0), (0.002, 0.0, 0.0))
    assert goodput(PLAIN, load(8), Acceptance(8), cost) == pytest.approx(8 / 0.020)
    # a switch of 0.1 s, paid back over ten rounds
    assert goodput(PLAIN, load(8), Acceptance(8), cost, dwell=10, switch_s=0.1) == pytest.approx(8 / 0.030)


def test_the_ranking_is_by_goodput_and_off_wins_within_the_margin():
    machine, acceptance, cost = known({"a": 0.7, "b": 0.3})
    for active in range(1, 65):
        found = solve(load(active), machine.plans, acceptance, cost)
        assert {candidate.plan for candidate in found} == set(machine.plans)
        rest = [candidate for candidate in found if candidate.plan.n]
        assert [c.goodput for c in rest] == sorted((c.goodput for c in rest), reverse=True)
        plain = goodput(PLAIN, load(active), acceptance, cost)
        assert (found[0].plan == PLAIN) == (rest[0].goodput <= 1.03 * plain)
    assert solve(load(1), machine.plans, acceptance, cost)[0].plan.n
    assert solve(load(64), machine.plans, acceptance, cost)[0].plan == PLAIN


def test_no_deeper_than_the_budget_pays():
    machine, acceptance, cost = known({"a": 0.9})
    last = {c.plan: c for c in solve(load(2, (1, 1)), machine.plans, acceptance, cost)}
    assert all(candidate.tokens == 2 for candidate in last.values())
    assert solve(load(2, (1, 1)), machine.plans, acceptance, cost)[0].plan == PLAIN
    two = {c.plan: c for c in solve(load(2, (2, 2)), machine.plans, acceptance, cost)}
    assert two[Plan("a", 7, 1, 7)].tokens == pytest.approx(two[Plan("a", 1, 1, 1)].tokens)


def test_switching_costs_count_over_the_dwell():
    machine, acceptance, cost = known({"a": 0.9})
    switch = [0.0, *[1.0] * (len(machine.plans) - 1)]
    assert solve(load(1), machine.plans, acceptance, cost, 8, switch)[0].plan == PLAIN
    assert solve(load(1), machine.plans, acceptance, cost, 1000, switch)[0].plan.n


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


def test_a_tree_is_weighed_by_its_nodes():
    _, acceptance, cost = known({"a": 0.7})
    tree, chain = Plan("a", 2, 4, 16), Plan("a", 2, 1, 2)
    for _ in range(100):
        acceptance.observe(RoundRecord(8, 0, tree, 128, 14, 22, 0.0, 0.1, 0.0, CONTEXT, (8, 8), (8, 7), (7, 7)))
    promise = {c.plan: c for c in solve(load(8), (PLAIN, tree, chain), acceptance, cost)}
    assert promise[tree].tokens > promise[chain].tokens
    assert promise[tree].seconds > promise[chain].seconds
