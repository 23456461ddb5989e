"""Combs: their shape is the plan's, their tokens are their law's, and a shared race matches as often as it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from respec.rollout.draft.comb import Comb, grow, race_rows, widths
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.randomness import Lane, sequence_key, token_key
from respec.rollout.request import Request
from respec.rollout.sampling import draw, process, race, racers
from respec.types import Ask, Mode, Plan, Prompt, Proposer, Sampling, Stream

SAMPLING = Sampling(30, 0.8)


def context(mode: Mode, sampling: Sampling = SAMPLING) -> DraftContext:
    cache: Any = None
    return DraftContext(sampling, mode, cache)


def request(tokens: int = 2) -> Request:
    ask = Ask(Prompt(0, "", (3,)), Stream.TRAIN, 0, 1)
    return Request(ask, 0, sequence_key(1, 0, 0, 0, 0), 0, tokens=[5] * tokens)


@pytest.mark.parametrize(("plan", "limit", "expected"), [
    (Plan("x", 4, 1, 4), 9, (1, 1, 1, 1)), (Plan("x", 4, 1, 4), 2, (1, 1)), (Plan("x", 4, 1, 2), 9, (1, 1)),
    (Plan("x", 3, 3, 8), 9, (3, 3, 2)), (Plan("x", 3, 4, 6), 9, (4, 1, 1)), (Plan("x", 3, 3, 8), 0, ()),
    (Plan("x", 3, 3, 8), -1, ()),
])  # fmt: skip
def test_the_plan_settles_the_shape_chain_first_then_siblings_from_the_top(plan, limit, expected):
    assert widths(plan, limit) == expected
    assert sum(expected) <= plan.n


@pytest.mark.parametrize("mode", ["matching", "rejection"])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(30, 1.0, top_k=3), Sampling(30, 0.0)], ids=str)
def test_nodes_are_the_first_arrivals_of_their_law(mode, sampling):
    plan, asked = Plan("x", 3, 4, 9), request()
    comb, under = Comb(asked, widths(plan, 9)), context(mode, sampling)
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(1, 48)) * 2 for _ in range(3)]
    for row in rows:
        assert comb.wants
        grow([comb], torch.from_numpy(row), under)
    assert not comb.wants
    tree = comb.tree(Proposer.MODEL)
    assert tree.proposer == Proposer.MODEL and len(tree.token_n) <= plan.n
    assert tree.parent_n[:3] == (-1, 0, 1) and set(tree.law) == ({-1, 0, 1} if mode == "rejection" else set())
    for depth, row in enumerate(rows):
        p = process(row[0], sampling).p
        key = token_key(asked.key, np.array([2 + depth]), Lane.DRAFT if mode == "rejection" else Lane.TARGET)
        arrived = race(p, key, widths(plan, 9)[depth])
        assert [tree.token_n[i] for i in tree.children[depth - 1]] == arrived.tolist()
        if mode == "rejection":
            assert np.abs(tree.law[depth - 1] - p).max() < 1e-15


@pytest.mark.parametrize(("vocabulary", "sharpness"), [(48, 2.0), (1000, 4.0)])
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
def test_a_shared_race_matches_at_least_as_often_as_promised(vocabulary, sharpness, noise):
    """Daliri et al. 2024: with probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which is at least (1 - TV) / (1 + TV).

    Of a large vocabulary only the likeliest race one by one; what the tails win may not match. n = 2,000 keys; the frequency may fall 4.5
    standard deviations (level 4e-6) short.
    """
    n, rng = 2000, np.random.default_rng(2)
    target = rng.normal(size=vocabulary) * sharpness
    drafter = target + noise * rng.normal(size=vocabulary)
    p, q = process(target, Sampling(1)).p, process(drafter, Sampling(1)).p
    exact = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(vocabulary))
    distance = np.abs(p - q).sum() / 2
    assert exact >= (1 - distance) / (1 + distance)
    raced = racers(vocabulary)
    tails = np.maximum(1 - np.sort(p)[::-1][:raced].sum(), 1 - np.sort(q)[::-1][:raced].sum())
    assert tails < 0.1
    keys = token_key(np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), np.zeros(n, np.int64), Lane.TARGET)
    rows = [torch.from_numpy(np.tile(x, (n, 1))).float() for x in (target, drafter)]
    drawn = draw(rows[0], keys, Sampling(1)).token
    first = np.array([a.token[0] for a in race_rows(rows[1], keys, [1] * n, context("matching", Sampling(1)))])
    matched, slack = float((drawn == first).mean()), 4.5 * (exact * (1 - exact) / n) ** 0.5
    assert exact - 2 * tails - slack <= matched <= exact + 2 * tails + slack
    wide = race_rows(rows[1][:300], keys[:300], [3] * 300, context("matching", Sampling(1)))
    within = np.mean([token in arrivals.token for token, arrivals in zip(drawn, wide, strict=False)])
    assert within >= (drawn[:300] == first[:300]).mean()
