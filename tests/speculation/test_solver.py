"""The solver is pure, weighs tokens against seconds as stated, and prefers plain decoding when nothing beats it."""

from __future__ import annotations

import pytest
from simulator import CONTEXT, Machine

from respec.speculation.acceptance import Acceptance
from respec.speculation.cost_model import CostModel, fit
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


def test_a_tree_is_weighed_by_its_nodes():
    _, acceptance, cost = known({"a": 0.7})
    tree, chain = Plan("a", 2, 4, 16), Plan("a", 2, 1, 2)
    for _ in range(100):
        acceptance.observe(RoundRecord(8, 0, tree, 128, 14, 22, 0.0, 0.1, 0.0, CONTEXT, (8, 8), (8, 7), (7, 7)))
    promise = {c.plan: c for c in solve(load(8), (PLAIN, tree, chain), acceptance, cost)}
    assert promise[tree].tokens > promise[chain].tokens
    assert promise[tree].seconds > promise[chain].seconds
