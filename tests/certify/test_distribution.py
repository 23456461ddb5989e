"""Check c: the right sampler passes, one that is as wrong as the power statement says fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.certify import distribution
from respec.certify.distribution import cells, first_tokens, uniform_transforms
from respec.certify.reference import ORDERS, Judged
from respec.certify.sampler import Samples, certify_sampler
from respec.types import PLAIN, Sampling

SAMPLING = Sampling(24, 1.0)


def judged_of(pit: np.ndarray, apart: float = 0.0) -> Judged:
    nought = np.zeros(len(pit))
    return Judged(nought + apart, nought, nought > 1, dict.fromkeys(ORDERS, pit))


def towards(share: float, choose=lambda p: p.argmax(1)):
    """With this probability the chosen token is taken whatever the model says: a verifier that lets drafts through unjudged."""

    def bend(p: np.ndarray, place: int) -> np.ndarray:
        point = np.zeros_like(p)
        point[np.arange(len(p)), choose(p)] = 1.0
        return (1 - share) * p + share * point

    return bend


def samples(asks, group: int) -> Samples:
    return Samples(asks(group), SAMPLING, asks(4 * group), Sampling(2))


@pytest.mark.parametrize("seed", range(5))
def test_the_right_sampler_passes(make_sampler, reference, asks, seed):
    """A false alarm has a probability of 1e-4 for each of the ten findings."""
    found = certify_sampler("it", make_sampler(seed=seed), PLAIN, samples(asks, 40), reference, torch.float32, 1e-4)
    assert [finding.check for finding in found] == ["distribution", "first tokens", "log-probabilities"]
    assert all(finding.outcome == "passed" for finding in found), found


@pytest.mark.parametrize("choose", [lambda p: p.argmax(1), lambda p: p.argmin(1), lambda p: np.full(len(p), 3)],
                         ids=["likely", "unlikely", "one id"])  # fmt: skip
def test_a_sampler_biased_by_five_percent_fails(make_sampler, reference, asks, choose):
    """13440 tokens detect a TV of 0.033 over the bins with probability 0.99 in the worst direction. The bias moves 0.05 less the chosen
    token's own mass and less what falls into the same bin: 0.04 and more in one of the orders."""
    drawn = make_sampler(towards(0.05, choose))(asks(140), SAMPLING, PLAIN)
    finding = uniform_transforms("it", reference.judge(drawn, 1.0))
    assert finding.figures["detectable_tv"] == pytest.approx(0.033, abs=0.001)
    assert max(finding.figures[f"shift_{order}"] or 0.0 for order in ORDERS) > 0.033
    assert finding.outcome == "failed" and "do not fit" in finding.sentence


def test_a_bias_of_one_percent_is_found_with_enough_tokens():
    """In the hardest direction, half of the mass a little too heavy: 200 samples of as many tokens as 0.01 needs, then a tenth of it.

    Power 0.99: fewer than 192 found has a probability below 1e-3.
    """
    rng, n = np.random.default_rng(1), 152_000
    found = 0
    for _ in range(200):
        lower = rng.random(n) < 0.51
        finding = uniform_transforms("it", judged_of((rng.random(n) + ~lower) / 2))
        assert (finding.figures["detectable_tv"] or 1.0) <= 0.01
        found += finding.outcome == "failed"
    assert found >= 192
    lower = rng.random(n) < 0.501
    assert uniform_transforms("it", judged_of((rng.random(n) + ~lower) / 2)).outcome == "passed"


def test_uniform_numbers_raise_no_alarm():
    """300 samples at a level of 1e-4: one alarm has a probability of 0.03, and the seed is fixed."""
    rng = np.random.default_rng(2)
    assert all(uniform_transforms("it", judged_of(rng.random(3000))).outcome == "passed" for _ in range(300))


def rounded(p: np.ndarray, place: int) -> np.ndarray:
    """Every log-probability off by about a fifth, always in the same direction for the same token: coarser than any dtype."""
    off = p * np.exp(0.2 * np.random.default_rng(7).normal(size=p.shape[1]))
    return off / off.sum(1, keepdims=True)


def test_a_distribution_that_is_rounded_and_recorded_so_passes(make_sampler, reference, asks):
    """It would be taken for a bias, were tokens not weighted by what is recorded: it is one, if the model's own is recorded."""
    group = samples(asks, 100)
    owning_up = make_sampler(rounded, owns_up=True)(group.asks, SAMPLING, PLAIN)
    assert uniform_transforms("it", reference.judge(owning_up, 1.0)).outcome == "passed"
    short = asks(1500)
    for owns_up, outcome in ((True, "passed"), (False, "failed")):
        drawn = make_sampler(rounded, owns_up=owns_up)(short, Sampling(2), PLAIN)
        assert first_tokens("it", drawn, reference, 1.0).outcome == outcome
    found = certify_sampler("it", make_sampler(rounded, owns_up=True), PLAIN, group, reference, torch.bfloat16, 0.02)
    assert [finding.outcome for finding in found] == ["passed", "passed", "failed"]


def test_what_is_no_number_fails(make_sampler, reference, asks):
    judged = judged_of(np.random.default_rng(0).random(500))
    judged.recorded_N[3] = np.nan
    assert uniform_transforms("it", judged).outcome == "failed"


def test_a_bias_at_the_first_token_alone_fails_there(make_sampler, reference, asks):
    """The most and the least probable token change places: a TV of their difference. 6000 draws detect 0.08 in the worst direction; this
    one lies in few cells and is far clearer."""

    def bend(p: np.ndarray, place: int) -> np.ndarray:
        if place:
            return p
        one, two = p[0].argmax(), p[0].argmin()
        swapped = p.copy()
        swapped[:, [one, two]] = p[:, [two, one]]
        return swapped

    sampling = Sampling(2, 1.0)
    wrong = make_sampler(bend)(asks(1500), sampling, PLAIN)
    finding = first_tokens("it", wrong, reference, 1.0)
    assert finding.outcome == "failed", finding
    right = make_sampler()(asks(1500), sampling, PLAIN)
    assert first_tokens("it", right, reference, 1.0).outcome == "passed"


def test_cells_hold_all_draws_and_all_mass(make_completion, asks):
    p = np.array([0.5, 0.3, 0.15, 0.03, 0.02])
    tokens = np.random.default_rng(0).choice(5, 100, p=p).astype(np.int32)
    drawn = [make_completion(asks(1)[0], 0, tokens[i : i + 1], np.log(p[tokens[i : i + 1]])) for i in range(100)]
    for draws in (drawn, drawn[:40], drawn[:15]):
        held = cells(draws, p)
        assert held.count_K.sum() == pytest.approx(len(draws))
        assert held.mass_K.sum() == pytest.approx(1.0)
        assert (len(draws) * held.mass_K >= distribution.FEWEST_EXPECTED).all()
    # 20, 12 expected, and the other three together 8: too few for a group
    assert cells(drawn[:40], p).mass_K.tolist() == pytest.approx([0.5, 0.5])
    assert cells(drawn, p).mass_K.tolist() == pytest.approx([0.5, 0.3, 0.2])
    count = np.bincount(tokens, minlength=5)
    assert cells(drawn, p).count_K.tolist() == pytest.approx([count[0], count[1], count[2:].sum()])


def test_prompts_that_leave_no_choice_are_not_counted_as_checked(reference, asks, make_sampler, monkeypatch):
    monkeypatch.setattr(reference, "after", lambda known, temperature: np.log(np.eye(48)[5] + 1e-30))
    drawn = make_sampler(towards(1.0, lambda p: np.full(len(p), 5)), owns_up=True)(asks(20), Sampling(2), PLAIN)
    assert first_tokens("it", drawn, reference, 1.0).outcome == "unchecked"
