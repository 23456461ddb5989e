"""The rate's way through a run, and a gate that tells a head that fell behind from a policy that became harder to draft for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from respec.drafter.examples import capture
from respec.drafter.judge import BANDS, Judgement, judge
from respec.drafter.schedule import Gate, rate
from respec.drafter.unroll import unroll
from respec.models.eagle import create_head
from respec.types import Sampling


def test_the_rate_rises_then_falls_to_its_floor():
    constant = [rate(step, 10, 2.0, 4, "constant", 0.0) for step in range(10)]
    assert constant == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6
    for decay in ("linear", "cosine"):
        rates = [rate(step, 10, 2.0, 2, decay, 0.25) for step in range(11)]
        assert rates[1] == rates[2] == 2.0 and rates[10] == pytest.approx(0.5)
        assert all(a > b for a, b in pairwise(rates[2:]))
    assert rate(6, 10, 2.0, 2, "linear", 0.0) == rate(6, 10, 2.0, 2, "cosine", 0.0) == pytest.approx(1.0)


def judgement(shares: tuple[float, float], overlaps: tuple[float, float]) -> Judgement:
    """Of a thousand tokens in two bands: the surest and the least sure."""
    count, overlap = np.zeros(len(BANDS) + 1), np.zeros(len(BANDS) + 1)
    count[[0, -1]], overlap[[0, -1]] = np.array(shares) * 1000, overlaps
    return Judgement(np.array([1000.0]), np.array([np.dot(shares, overlaps)]), count, overlap, {})


def test_entropy_explains_what_a_harder_text_costs_and_no_more():
    gate = Gate(0.05)
    assert gate.drift(judgement((0.9, 0.1), (0.95, 0.5))) == 0.0
    # as good in each band, on more of what is hard: 0.9 -> 0.725, and nothing is amiss
    assert gate.drift(judgement((0.5, 0.5), (0.95, 0.5))) == pytest.approx(0.0) and not gate.opens(0.0)
    # the text of the beginning, and worse in each band
    drift = gate.drift(judgement((0.9, 0.1), (0.85, 0.4)))
    assert drift == pytest.approx(0.1) and gate.opens(drift)


def test_the_best_is_what_counts_whenever_it_was():
    gate = Gate(0.03)
    for overlap, missing in ((0.8, 0.0), (0.9, -0.1), (0.88, 0.02), (0.86, 0.04), (0.9, 0.0)):
        drift = gate.drift(judgement((1.0, 0.0), (overlap, 0.0)))
        assert drift == pytest.approx(missing)
        assert gate.opens(drift) == (missing > 0.03)


def test_a_gate_without_a_margin_is_always_open():
    assert Gate(0.0).opens(-1.0)


def test_a_gate_goes_on_from_what_was_saved():
    gate, later = Gate(0.03), Gate(0.03)
    later.load_state_dict(gate.state_dict())
    gate.drift(judgement((0.7, 0.3), (0.9, 0.6)))
    later.load_state_dict(gate.state_dict())
    worse = judgement((0.4, 0.6), (0.8, 0.5))
    assert later.drift(worse) == gate.drift(worse) > 0


def test_a_judgement_is_the_mean_overlap_and_its_bands_are_of_the_targets_entropy(policy, rollouts):
    head = create_head(policy.model, seed=1)
    examples = capture(policy.model, (2, 3, 4), rollouts, Sampling(24, 0.8), 40)
    seen = judge(head, examples, 3, 0.8, tokens=60)
    overlaps, exists = unroll(head, examples, 3, 0.8).overlaps()
    means = overlaps.sum(0) / exists.sum(0)
    assert seen.overlap_K.tolist() == pytest.approx(means.tolist())
    assert (seen.count_E * seen.overlap_E).sum() / seen.count_E.sum() == pytest.approx(seen.overlap_K[0])
    # no policy of forty words has more than 3.7 nats, and with all of them in view there is no tail
    entropy = torch.cat([-torch.special.xlogy(e.p_CK, e.p_CK).sum(1)[1 if e.prompt == 1 else 0 :] for e in examples])
    assert seen.count_E.sum() == len(entropy) and seen.count_E[0] == (entropy <= BANDS[0]).sum()
    assert seen.expected_length == pytest.approx(1 + np.cumprod(seen.overlap_K).sum())
