"""Check d: recorded log-probabilities that are not the target's are found, even when only drafted tokens have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.certify.honesty import LAW, MEASURED, allowed_mean, honest_logprobs
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


def test_no_more_is_allowed_than_the_law_or_transformers_own_rounding(policy, reference, make_sampler, asks):
    drawn = make_sampler()(asks(40), Sampling(12), PLAIN)
    assert allowed_mean(reference, drawn, 1.0, torch.float32) == LAW[torch.float32]
    step = -(-40 * 4 * 12 // MEASURED)
    few = drawn[::step]
    apart = np.abs(reference.rounded(torch.bfloat16).judge(few, 1.0).logprob_N - reference.judge(few, 1.0).logprob_N)
    assert allowed_mean(reference, drawn, 1.0, torch.bfloat16) == pytest.approx(max(apart.mean(), 0.02))
    assert 0 < apart.mean() < 0.2
    # the model itself stays as it was
    assert policy.model.dtype == torch.float32


def test_a_few_wrong_drafted_tokens_do_not_drown_among_the_others():
    drafted = np.arange(1000) < 20
    finding = honest_logprobs("it", judged(np.where(drafted, 0.5, 0.0), drafted), torch.bfloat16, 0.02)
    assert (finding.figures["mean_all"] or 1.0) < 0.02
    assert finding.outcome == "failed" and "drafted" in finding.sentence


def test_what_is_no_number_fails():
    assert honest_logprobs("it", judged(np.array([0.0, np.nan])), torch.bfloat16, 0.02).outcome == "failed"
