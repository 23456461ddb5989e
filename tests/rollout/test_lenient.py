"""Lenient verification by enumeration: its law, its loss, and a weight that is exact for a draft that knows nothing of the policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from respec.errors import ConfigError
from respec.rollout.lenient import kept_probability, output_law, redrawn_mass, refuse_lenience, weight

V = 4
LENIENCE = (1.0, 1.5, 10.0, np.inf)


def laws(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(V, 0.6), size=count)


@pytest.mark.parametrize("lenience", LENIENCE)
def test_the_law_is_what_keeping_and_drawing_anew_give(lenience):
    for p, q in zip(laws(0, 20), laws(1, 20), strict=True):
        kept = q * kept_probability(p, q, lenience)
        assert np.abs(kept + (1 - kept.sum()) * p - output_law(p, q, lenience)).max() < 1e-12
        assert abs(redrawn_mass(p, q, lenience) - (1 - kept.sum())) < 1e-12
        assert abs(output_law(p, q, lenience).sum() - 1) < 1e-12


def test_it_is_lossy_at_any_lenience_and_the_more_the_faster():
    p, q = laws(2, 2)
    distance = [np.abs(output_law(p, q, lenience) - p).sum() / 2 for lenience in LENIENCE]
    redrawn = [redrawn_mass(p, q, lenience) for lenience in LENIENCE]
    assert distance[0] > 0.01 and distance == sorted(distance) and redrawn == sorted(redrawn, reverse=True)
    assert np.abs(output_law(p, q, np.inf) - q).max() < 1e-12
    assert np.abs(output_law(p, p, 1.0) - p).max() < 1e-12


@pytest.mark.parametrize("lenience", LENIENCE)
def test_weights_turn_expectations_over_whole_completions_into_the_targets(lenience):
    """Three tokens, each law given all before; every old answer, every choice of keeping or drawing anew, every new token.

    The old answer is drawn from q alone. The weight of a completion is the product over its places, 1 past the first drawn anew.
    """
    length = 3
    prefixes = [prefix for n in range(length) for prefix in itertools.product(range(V), repeat=n)]
    target = dict(zip(prefixes, laws(3, len(prefixes)), strict=True))
    old = dict(zip(prefixes, laws(4, len(prefixes)), strict=True))
    weighted, truth = np.zeros((V,) * length), np.zeros((V,) * length)

    def go(prefix: tuple[int, ...], probability: float, so_far: float, following: bool) -> None:
        if len(prefix) == length:
            weighted[prefix] += probability * so_far
            return
        p, q = target[prefix], old[prefix]
        if not following:
            for x in range(V):
                go((*prefix, x), probability * p[x], so_far, False)
            return
        w = weight(p, q, lenience, redrawn_mass(p, q, lenience))
        for y in range(V):
            stands = q[y] * float(kept_probability(p[y], q[y], lenience))
            go((*prefix, y), probability * stands, so_far * w[y], True)
            for x in range(V):
                go((*prefix, x), probability * (q[y] - stands) * p[x], so_far * w[x], False)

    go((), 1.0, 1.0, True)
    for sequence in itertools.product(range(V), repeat=length):
        truth[sequence] = np.prod([target[sequence[:n]][sequence[n]] for n in range(length)])
    assert np.abs(weighted - truth).max() < 1e-12


def test_for_a_draft_that_has_moved_the_policy_the_weight_is_not_exact():
    """A policy that has learned to say its old answer more often: p depends on y, and the weighted law is off."""
    q, base = laws(5, 2)
    weighted = np.zeros(V)
    marginal = np.zeros(V)
    for y in range(V):
        p = 0.7 * base + 0.3 * np.eye(V)[y]
        stands = float(kept_probability(p[y], q[y], 1.5))
        out = np.eye(V)[y] * stands + (1 - stands) * p
        marginal += q[y] * p
        weighted += q[y] * out * weight(p, q, 1.5, redrawn_mass(p, q, 1.5))
    assert np.abs(weighted - marginal).max() > 0.01


@pytest.mark.parametrize("lenience", [0.5, 0.0, -1.0, float("nan")])
def test_a_lenience_below_one_is_refused(lenience):
    with pytest.raises(ConfigError, match="at least 1"):
        refuse_lenience(lenience)
    refuse_lenience(1.0)
