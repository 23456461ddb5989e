"""Check d: recorded log-probabilities that are not the target's are found, even when only drafted tokens have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.certify.honesty import LAW, MEASURED, allowed_mean, honest_logprobs, sampling_margin
from respec.certify.reference import Judged
from respec.types import PLAIN, Sampling


def judged(apart: np.ndarray, drafted: np.ndarray | None = None) -> Judged:
    logprob = np.linspace(-5, -0.1, len(apart))
    return Judged(logprob + apart, logprob, np.zeros(len(apart), bool) if drafted is None else drafted, {})


def test_those_of_the_right_engine_pass(make_sampler, reference, asks):
    drawn = make_sampler()(asks(4), Sampling(12, 0.7), PLAIN)
    finding = honest_logprobs("it", reference.judge(drawn, 0.7), torch.float32, 1e-4)
    assert finding.outcome == "passed" and (finding.figures["max"] or 1.0) < 1e-4


def test_those_at_another_temperature_fail(make_sampler, reference, asks):
    drawn = make_sampler()(asks(4), Sampling(12, 0.7), PLAIN)
    assert honest_logprobs("it", reference.judge(drawn, 1.0), torch.bfloat16, 0.02).outcome == "failed"


def test_the_mean_decides():
    signs = np.where(np.arange(100) % 2, 1.0, -1.0)
    assert honest_logprobs("it", judged(0.029 * signs), torch.bfloat16, 0.03).outcome == "passed"
    assert honest_logprobs("it", judged(0.031 * signs), torch.bfloat16, 0.03).outcome == "failed"


def test_what_passes_but_is_more_than_training_wants_is_said():
    assert "wants" in honest_logprobs("it", judged(np.full(9, 0.025)), torch.bfloat16, 0.03).sentence
    assert "wants" not in honest_logprobs("it", judged(np.full(9, 0.015)), torch.bfloat16, 0.03).sentence


def test_no_more_is_allowed_than_the_law_or_transformers_own_rounding(
    monkeypatch, policy, reference, make_sampler, asks
):
    drawn = make_sampler()(asks(40), Sampling(12), PLAIN)
    assert allowed_mean(reference, drawn, 1.0, torch.float32) == LAW[torch.float32]
    step = -(-40 * 4 * 12 // MEASURED)
    few = drawn[::step]
    apart = np.abs(reference.rounded(torch.bfloat16).judge(few, 1.0).logprob_N - reference.judge(few, 1.0).logprob_N)
    margin = sampling_margin(apart, np.array([len(rollout.token_T) for rollout in few]), len(drawn))
    assert allowed_mean(reference, drawn, 1.0, torch.bfloat16) == pytest.approx(max(apart.mean() + margin, 0.02))
    # a small model rounds within the law, so what is beyond it is looked at without one
    monkeypatch.setitem(LAW, torch.bfloat16, 0.0)
    assert allowed_mean(reference, drawn, 1.0, torch.bfloat16) == pytest.approx(apart.mean() + margin)
    assert 0 < apart.mean() < 0.2 and margin > 0
    # the model itself stays as it was
    assert policy.model.dtype == torch.float32


def differences(rng: np.random.Generator, level_RT: np.ndarray) -> np.ndarray:
    """Heavy-tailed ones, as bfloat16's are: of the size that a token and its completion have."""
    return np.abs(level_RT * rng.standard_t(4, level_RT.shape))


def levels(rng: np.random.Generator) -> np.ndarray:
    """For 64 completions of 32 tokens."""
    return 0.027 * rng.lognormal(-0.08, 0.4, (64, 1)) * rng.lognormal(-0.32, 0.8, (64, 32))


def test_an_engine_that_rounds_as_transformers_do_passes_and_one_that_is_worse_by_a_half_does_not():
    """Every second of 64 completions is measured. 1000 tries at a level of one in 700 see more than 8 failures once in 10,000 times (Poisson); without
    the margin every second fails. One that is off by half as much again is seen with a power of 0.9."""
    rng, fails, bare, seen = np.random.default_rng(0), 0, 0, 0
    for _ in range(1000):
        level = levels(rng)
        measured, drawn = differences(rng, level[::2]), differences(rng, level).mean()
        allowed = measured.mean() + sampling_margin(measured.ravel(), np.full(32, 32), 64)
        fails, bare, seen = fails + (drawn > allowed), bare + (drawn > measured.mean()), seen + (1.5 * drawn > allowed)
    assert fails <= 8 and 400 < bare < 600 and seen > 800


def test_the_margin_counts_completions_not_tokens():
    rng = np.random.default_rng(1)
    apart, lengths = differences(rng, levels(rng)[::2]).ravel(), np.full(32, 32)
    alike = np.repeat(apart.reshape(32, 32).mean(1), 32)
    # tokens of a completion that say the same say it once
    assert sampling_margin(alike, lengths, 64) == pytest.approx(sampling_margin(apart, lengths, 64))
    assert sampling_margin(np.full(64, 0.03), np.full(2, 32), 64) == pytest.approx(0.0)
    assert sampling_margin(apart[:32], lengths[:1], 64) == 0.0


def test_a_few_wrong_drafted_tokens_do_not_drown_among_the_others():
    drafted = np.arange(1000) < 20
    finding = honest_logprobs("it", judged(np.where(drafted, 0.5, 0.0), drafted), torch.bfloat16, 0.02)
    assert (finding.figures["mean_all"] or 1.0) < 0.02
    assert finding.outcome == "failed" and "drafted" in finding.sentence


def test_what_is_no_number_fails():
    assert honest_logprobs("it", judged(np.array([0.0, np.nan])), torch.bfloat16, 0.02).outcome == "failed"
