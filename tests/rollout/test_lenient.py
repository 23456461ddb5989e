"""Lenient verification by enumeration: its law, its loss, and a weight that is exact for a draft that knows nothing of the policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from respec.errors import ConfigError
from respec.rollout.lenient import (
    Lenience,
    kept_probability,
    output_law,
    record,
    redrawn_mass,
    refuse_lenience,
    stands,
    weight,
    weights_of,
)

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
    with pytest.raises(ConfigError, match="at least 1"):
        Lenience(lenience, 64)
    refuse_lenience(1.0)


def recorded(p: np.ndarray, token: int, count: int) -> np.ndarray:
    return record(p[None], np.array([token], np.int32), count)[0]


def weight_of(p: np.ndarray, law: np.ndarray, token: int, lenience: float) -> float:
    return float(weights_of(p[None], law[None], np.array([token], np.int32), lenience)[0])


def wide(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(40, 0.2), size=count)


def test_a_record_holds_the_most_probable_tokens_and_the_one_that_came_out():
    (p,) = wide(0, 1)
    order = np.argsort(-p)
    for token in (order[0], order[4], order[20]):
        law = recorded(p, int(token), 5)
        expected = [*order[:4], token if token == order[20] else order[4]]
        assert law["token"].tolist() == expected and np.allclose(law["logp"], np.log(p[expected]), rtol=1e-6)
    assert len(recorded(p, 0, 999)) == 40
    point = recorded(np.eye(40)[3], 3, 4)
    assert point["token"][0] == 3 and point["logp"].tolist() == [0.0, *[-np.inf] * 3]


@pytest.mark.parametrize("lenience", LENIENCE)
def test_the_weight_by_a_whole_record_is_the_weight(lenience):
    for p, q in zip(wide(1, 10), wide(2, 10), strict=True):
        exact = weight(p, q, lenience, redrawn_mass(p, q, lenience))
        law = recorded(q, 0, 40)
        assert np.allclose([weight_of(p, law, x, lenience) for x in range(40)], exact, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("lenience", LENIENCE)
def test_with_a_bucket_the_weight_of_a_recorded_token_is_an_upper_bound(count, lenience):
    for p, q in zip(wide(3, 20), wide(4, 20), strict=True):
        exact = weight(p, q, lenience, redrawn_mass(p, q, lenience))
        law = recorded(q, int(q.argmax()), count)
        found = np.array([weight_of(p, law, x, lenience) for x in range(40)])
        inside = law["token"]
        assert (found[inside] >= exact[inside] * (1 - 1e-5)).all()
        outside = np.setdiff1d(np.arange(40), inside)
        assert np.ptp(found[outside]) == 0
        # so merged, the law still adds up to 1
        merged = (p[inside] / found[inside]).sum() + p[outside].sum() / found[outside[0]]
        assert abs(merged - 1) < 1e-5


def test_a_token_drawn_anew_has_a_finite_weight_however_little_was_lacking():
    """q is all but p, and has nothing of the last token: r is what the one refused token lacks, and no rounding may make it nought."""
    p = np.array([0.5, 0.3, 0.199, 0.0, 0.001])
    q = np.array([0.5, 0.3, 0.2 - 1e-6, 1e-6, 0.0])
    law = recorded(q, 3, 5)
    assert not stands(p[None], law[None], np.array([3], np.int32), 1.5, np.array([0.5]))[0]
    assert weight_of(p, law, 4, 1.5) == pytest.approx(1e6, rel=0.1)
    assert all(weight_of(p, law, x, 1.5) == pytest.approx(1, rel=1e-2) for x in (0, 1, 2))
