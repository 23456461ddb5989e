"""GAE and V-trace: against their definitions, summed out by hand in float64, and the promises they make of each other."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from respec.config import CriticConfig
from respec.policy.valued import VALUED, Course, gae, vtrace

LENGTHS = (1, 2, 7, 40)


def course(length: int, after: float = 0.0, off: float = 0.0) -> Course:
    """Random rewards at every step, values, and log-ratios of spread `off`."""
    draws = np.random.default_rng((length, 3))
    reward_T, value_T, ratio_T = draws.standard_normal((3, length))
    return Course(reward_T, value_T, after, off * ratio_T)


def gae_by_hand(item: Course, gamma: float, lam: float) -> list[float]:
    """Equation 16 as it stands: sums of (gamma lam)^l delta_{t+l}, nothing carried over."""
    values = [*item.value_T.tolist(), item.after]
    delta = [float(r) + gamma * values[t + 1] - values[t] for t, r in enumerate(item.reward_T)]
    return [math.fsum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


def vtrace_by_hand(
    item: Course, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[list[float], list[float]]:
    """Equation 1 as it stands: v_s = V_s + sum_t gamma^(t-s) (prod_{i<t} c_i) delta_t; then the advantages."""
    values, ratios = [*item.value_T.tolist(), item.after], [math.exp(x) for x in item.log_ratio_T]
    rho = [min(rho_clip, r) for r in ratios]
    c = [lam * min(c_clip, r) for r in ratios]
    delta = [rho[t] * (float(r) + gamma * values[t + 1] - values[t]) for t, r in enumerate(item.reward_T)]
    steps = range(len(delta))
    v = [
        values[s] + math.fsum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, len(delta)))
        for s in steps
    ]
    later = [*v, item.after]
    return v, [rho[s] * (float(item.reward_T[s]) + gamma * later[s + 1] - values[s]) for s in steps]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("after", [0.0, 0.7])
def test_gae_is_its_definition(length: int, gamma: float, lam: float, after: float) -> None:
    item = course(length, after)
    np.testing.assert_allclose(gae(item, gamma, lam), gae_by_hand(item, gamma, lam), rtol=1e-12, atol=1e-12)


def test_gae_in_numbers() -> None:
    """Three tokens, reward 1 at the end. delta = (0.9*0.4-0.5, 0.9*0.6-0.4, 1-0.6) = (-0.14, 0.14, 0.4); keep 0.9*0.5 = 0.45."""
    ended = Course(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.4, 0.6]), 0.0, np.zeros(3))
    np.testing.assert_allclose(gae(ended, 0.9, 0.5), [0.004, 0.32, 0.4], rtol=1e-12)
    # truncated, with 0.2 still to come: the last delta is 1 + 0.18 - 0.6
    cut = Course(ended.reward_T, ended.value_T, 0.2, np.zeros(3))
    np.testing.assert_allclose(gae(cut, 0.9, 0.5), [0.04045, 0.401, 0.58], rtol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("gamma", "lam", "rho", "c"), [(1.0, 1.0, 1.0, 1.0), (0.97, 0.9, 2.0, 1.1), (0.9, 1.0, 0.7, 0.5)]
)
def test_vtrace_is_its_definition(length: int, gamma: float, lam: float, rho: float, c: float) -> None:
    item = course(length, after=0.3, off=0.8)
    returns, advantages = vtrace_by_hand(item, gamma, lam, rho, c)
    judged = vtrace(item, gamma, lam, rho, c)
    np.testing.assert_allclose(judged.return_T, returns, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(judged.advantage_T, advantages, rtol=1e-12, atol=1e-12)


def test_vtrace_on_policy_is_gae() -> None:
    """Its returns are those of GAE at every lambda (remark 1 of the paper: the n-step Bellman target), its advantages at lambda 1."""
    item = course(12, after=0.4)
    for lam in (1.0, 0.8):
        np.testing.assert_allclose(
            vtrace(item, 0.9, lam, 1.0, 1.0).return_T, item.value_T + gae(item, 0.9, lam), rtol=1e-12
        )
    np.testing.assert_allclose(
        vtrace(item, 0.9, 1.0, 1.0, 1.0).advantage_T, gae(item, 0.9, 1.0), rtol=1e-12, atol=1e-12
    )


def test_vtrace_of_a_turn_is_that_of_one_step() -> None:
    """Steps may be turns: what the caller sums up is all that it sees."""
    turn = Course(np.array([1.0]), np.array([0.25]), 0.0, np.array([-0.1 + 0.3 - 0.7]))
    judged = vtrace(turn, 1.0, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(judged.advantage_T, [math.exp(-0.5) * 0.75], rtol=1e-12)
    np.testing.assert_allclose(judged.return_T, [0.25 + math.exp(-0.5) * 0.75], rtol=1e-12)


def test_at_lambda_one_advantages_and_values_add_up_to_what_was_earned() -> None:
    item = course(9)
    earned = [item.reward_T[t:].sum() for t in range(9)]
    np.testing.assert_allclose(gae(item, 1.0, 1.0) + item.value_T, earned, rtol=1e-12, atol=1e-12)


def test_the_critics_targets_have_a_lambda_of_their_own() -> None:
    item = course(6, after=0.5)
    same, decoupled = (VALUED["gae"](item, CriticConfig(lam=0.9, return_lam=value)) for value in (None, 1.0))
    np.testing.assert_array_equal(same.advantage_T, decoupled.advantage_T)
    np.testing.assert_allclose(same.return_T, item.value_T + gae(item, 1.0, 0.9))
    np.testing.assert_allclose(decoupled.return_T, item.value_T + gae(item, 1.0, 1.0))


def test_over_turns_too_they_do_and_at_one_they_are_what_was_to_come() -> None:
    """Without discounts the target of a token is what its turn and those after it earned, whatever the critic expected."""
    item = dataclasses.replace(course(6), turn_T=np.array([0, 0, 1, 2, 2, 2]))
    same, decoupled = (VALUED["bi_level_gae"](item, CriticConfig(lam=0.9, return_lam=at)) for at in (None, 1.0))
    np.testing.assert_array_equal(same.advantage_T, decoupled.advantage_T)
    np.testing.assert_allclose(same.return_T, item.value_T + same.advantage_T)
    earned_K = np.array([item.reward_T[:2].sum(), item.reward_T[2], item.reward_T[3:].sum()])
    to_come_K = earned_K[::-1].cumsum()[::-1]
    np.testing.assert_allclose(decoupled.return_T, to_come_K[item.turn_T], rtol=1e-12, atol=1e-12)
    assert not np.allclose(same.return_T, decoupled.return_T)
