"""Acceptance by depth is estimated without bias, knows how sure it is, forgets, and takes shadow evidence."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulator import Machine

from respec.speculation.acceptance import Acceptance
from respec.types import Plan, RoundRecord

FULL = np.ones(8)


def taught(a: float, available: float, rounds: int, s: int = 7, active: int = 32, **options: float) -> Acceptance:
    acceptance = Acceptance(8, **options)
    machine = Machine({"x": lambda round: a}, 0, (s,), available)
    for r in range(rounds):
        acceptance.observe(machine.run(active, machine.plans[1], r))
    return acceptance


def test_estimates_meet_the_truth():
    # about 1,600 sequences at depth 1 and 200 at depth 4: three standard errors are 0.04 and 0.1
    acceptance = taught(0.7, 0.9, 200, sequences=1600.0)
    np.testing.assert_allclose(acceptance.accept("x")[:4], 0.7, atol=0.1)
    np.testing.assert_allclose(acceptance.available("x")[:4], 0.9, atol=0.08)
    np.testing.assert_allclose(acceptance.drafted("x")[:4], 0.9 ** np.arange(1, 5), atol=0.06)
    outlook = acceptance.outlook("x", 1, FULL)
    truth = np.cumsum(0.63 ** np.arange(5))
    assert (np.abs(outlook.tokens_S[:5] - truth) < 3.5 * outlook.error_S[:5] + 1e-9).all()


def test_the_standard_error_is_honest():
    """Over 500 repeats its mean is the estimate's standard deviation, which these repeats know to 3 %: 10 % off has probability 1e-3."""
    estimate, error = [], []
    for seed in range(500):
        acceptance = Acceptance(4, sequences=1e9, rounds=1e9)
        machine = Machine({"x": lambda round: 0.6}, seed, (3,), available=1.0)
        for r in range(4):
            acceptance.observe(machine.run(64, machine.plans[1], r))
        outlook = acceptance.outlook("x", 1, np.ones(4))
        estimate.append(outlook.tokens_S[3])
        error.append(outlook.error_S[3])
    assert np.mean(error) == pytest.approx(np.std(estimate), rel=0.1)
    assert np.mean(estimate) == pytest.approx(np.sum(0.6 ** np.arange(4)), rel=0.02)


def test_tokens_and_their_spread_are_those_of_enumeration():
    acceptance = taught(0.7, 0.9, 50)
    step = acceptance.accept("x") * acceptance.available("x")
    outlook = acceptance.outlook("x", 1, FULL)
    stop = np.append(np.cumprod(np.append(1.0, step[:5]))[:-1] * (1 - step[:5]), np.prod(step[:5]))
    tokens = np.arange(1, 7)
    assert outlook.tokens_S[5] == pytest.approx((stop * tokens).sum())
    assert outlook.spread_S[5] == pytest.approx(np.sqrt((stop * tokens**2).sum() - (stop * tokens).sum() ** 2))


def test_a_budget_caps_tokens():
    outlook = taught(0.9, 1.0, 50).outlook("x", 1, np.array([1.0, 0.5, 0, 0, 0, 0, 0, 0]))
    full = taught(0.9, 1.0, 50).outlook("x", 1, FULL)
    assert outlook.tokens_S[1] == full.tokens_S[1]
    assert outlook.tokens_S[2] == pytest.approx(full.tokens_S[1] + (full.tokens_S[2] - full.tokens_S[1]) / 2)
    assert outlook.tokens_S[7] == outlook.tokens_S[2]


def test_a_drafter_that_finds_nothing_promises_nothing():
    acceptance = Acceptance(8)
    for _ in range(100):
        acceptance.observe(
            RoundRecord(8, 0, Plan("x", 4, 1, 4), 0, 0, 8, 0.0, 0.1, 0.0, 0.0, (0,) * 4, (0,) * 4, (0,) * 4)
        )
    outlook = acceptance.outlook("x", 1, FULL)
    assert outlook.tokens_S[4] < 1.01
    assert outlook.nodes_S[4] < 0.05


def test_sequences_without_room_are_no_evidence_against_availability():
    acceptance = Acceptance(8)
    record = RoundRecord(8, 0, Plan("x", 2, 1, 2), 9, 9, 17, 0.0, 0.1, 0.0, 0.0, (8, 1), (8, 1), (8, 1))
    for _ in range(50):
        acceptance.observe(record, asked_D=(8, 1))
    assert acceptance.available("x")[1] > 0.95


def test_deeper_depths_start_from_shallower_ones():
    acceptance = taught(0.9, 1.0, 50, s=1)
    assert acceptance.accept("x")[4] == pytest.approx(acceptance.accept("x")[0], abs=0.01)
    outlook = acceptance.outlook("x", 1, FULL)
    # but nobody has been there: the error per token grows
    assert outlook.error_S[4] / outlook.tokens_S[4] > 3 * outlook.error_S[1] / outlook.tokens_S[1]


def test_a_swap_discounts_and_shadow_evidence_fills():
    acceptance = taught(0.8, 1.0, 50)
    before = acceptance.effective("x")
    error = acceptance.outlook("x", 1, FULL).error_S[4]
    acceptance.discount(0.25)
    assert acceptance.effective("x") == pytest.approx(before / 4)
    assert acceptance.outlook("x", 1, FULL).error_S[4] > 1.5 * error
    acceptance.observe_shadow("x", (10_000, 3_000), (3_000, 900), weight=0.5)
    np.testing.assert_allclose(acceptance.accept("x")[:2], 0.3, atol=0.02)
    assert acceptance.available("x")[0] > 0.9  # a shadow says nothing about it


def test_a_round_that_contradicts_ends_the_belief():
    acceptance = taught(0.05, 1.0, 100)
    machine = Machine({"x": lambda round: 0.9}, 1, (1,), 1.0)
    for r in range(2):
        acceptance.observe(machine.run(32, machine.plans[1], r))
    assert acceptance.accept("x")[0] > 0.6
    # and chance does not: 400 rounds of the same drafter keep their evidence
    assert taught(0.5, 0.9, 400).effective("x") > 300


def test_the_idle_become_uncertain():
    acceptance = taught(0.8, 1.0, 50)
    other = Machine({"y": lambda round: 0.5}, 2, (2,))
    before = acceptance.outlook("x", 1, FULL)
    for r in range(800):
        acceptance.observe(other.run(4, other.plans[1], r))
    after = acceptance.outlook("x", 1, FULL)
    assert after.error_S[4] > 1.5 * before.error_S[4]
    assert after.tokens_S[4] == pytest.approx(before.tokens_S[4], rel=0.1)


def test_json_keeps_everything():
    acceptance = taught(0.7, 0.9, 20)
    again = Acceptance.from_dict(json.loads(json.dumps(acceptance.to_dict())))
    assert again.to_dict() == acceptance.to_dict()
    np.testing.assert_array_equal(again.outlook("x", 1, FULL).tokens_S, acceptance.outlook("x", 1, FULL).tokens_S)
