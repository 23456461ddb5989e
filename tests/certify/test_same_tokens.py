"""Check a: completions that part from plain decoding's are found, and rounding is told from bugs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from respec.certify.same_tokens import Explain, first_difference, same_tokens
from respec.types import PLAIN, Proposer, Sampling

ROW, SAMPLE, PLACE = 1, 1, 5


@pytest.fixture(scope="module")
def plain(make_sampler, asks):
    return make_sampler()(asks(3), Sampling(12), PLAIN)


def changed(rollouts, **fields):
    """The same completions, one of them with other fields; some tokens of each are said to be drafted."""
    drafted = [dataclasses.replace(r, proposer_T=np.full(len(r.token_T), Proposer.NGRAM, np.uint8)) for r in rollouts]
    return [dataclasses.replace(r, **fields) if (r.prompt.row, r.sample) == (ROW, SAMPLE) else r for r in drafted]


def one(rollouts):
    return next(r for r in rollouts if (r.prompt.row, r.sample) == (ROW, SAMPLE))


def compare(plain, drafted, lead: float | None = None, dtype: torch.dtype = torch.bfloat16):
    def margin(rollout, position, logp_V, winner, other):
        return lead

    explain = Explain(lambda known: np.zeros(48), margin, lambda token: f"<{token}>")
    return same_tokens("it", plain, {4: drafted}, dtype, explain)


def with_token(rollouts, gap: float = 0.0):
    """Another token at PLACE, what follows another too; log-probabilities before it off by `gap`."""
    token, logprob = one(rollouts).token_T.copy(), one(rollouts).logprob_T.copy()
    token[PLACE:] = (token[PLACE:] + 1) % 48
    logprob[:PLACE] += gap
    return changed(rollouts, token_T=token, logprob_T=logprob)


def test_equal_completions_pass_and_are_counted(plain):
    finding = compare(plain, changed(plain)[:6])
    assert finding.outcome == "passed"
    assert finding.figures == {"completions": 6, "tokens": 72, "accepted": 72}


def test_nothing_accepted_is_nothing_checked(plain):
    assert compare(plain, plain).outcome == "unchecked"


@pytest.mark.parametrize("gap, lead, cause", [
    (0.0, 0.03, "near tie"), (0.05, -0.1, "near tie"), (0.0, 1.5, "too clear a lead"), (0.0, -1.5, "too clear a lead"),
    (0.4, 0.01, "more than rounding"), (float("nan"), 0.01, "more than rounding"), (0.0, None, "cannot be said"),
])  # fmt: skip
def test_the_first_differing_token_is_told_with_its_cause(plain, gap, lead, cause):
    finding = compare(plain, with_token(plain, gap), lead)
    assert finding.outcome == "failed" and cause in finding.sentence, finding.sentence
    assert (finding.figures["row"], finding.figures["sample"], finding.figures["position"]) == (ROW, SAMPLE, PLACE)
    assert finding.figures["token_plain"] == one(plain).token_T[PLACE]
    assert finding.figures["token_drafted"] == (one(plain).token_T[PLACE] + 1) % 48
    assert finding.figures["logprob_plain"] == pytest.approx(one(plain).logprob_T[PLACE])
    assert finding.figures["margin"] == lead and finding.figures["batch"] == 4
    assert f"<{one(plain).token_T[PLACE]}>" in finding.sentence


def test_what_is_a_near_tie_in_bfloat16_is_none_in_float32(plain):
    assert "near tie" in compare(plain, with_token(plain), 0.03, torch.bfloat16).sentence
    assert "too clear" in compare(plain, with_token(plain), 0.03, torch.float32).sentence


@pytest.mark.parametrize("gap, cause", [(1e-6, "numerics"), (0.3, "a bug"), (float("nan"), "a bug")])
def test_log_probabilities_alone_that_differ_fail(plain, gap, cause):
    logprob = one(plain).logprob_T.copy()
    logprob[7] += gap
    finding = compare(plain, changed(plain, logprob_T=logprob))
    assert finding.outcome == "failed" and cause in finding.sentence
    assert finding.figures["position"] == 7


@pytest.mark.parametrize("cut_plain", [False, True])
def test_a_completion_that_ends_elsewhere_fails(plain, cut_plain):
    cut = {name: getattr(one(plain), name)[:9] for name in ("token_T", "logprob_T", "proposer_T")}
    shorter = changed(plain, **cut)
    finding = compare(shorter, changed(plain)) if cut_plain else compare(plain, shorter)
    assert finding.outcome == "failed" and "the end" in finding.sentence and "is ended" in finding.sentence
    assert finding.figures["position"] == 9


def test_a_differing_token_comes_before_an_earlier_differing_log_probability(plain):
    drafted = with_token(plain)
    logprob = drafted[0].logprob_T + np.float32(0.01)
    drafted[0] = dataclasses.replace(drafted[0], logprob_T=logprob)
    difference = first_difference(plain, drafted)
    assert difference is not None and difference.position == PLACE


def test_completions_that_were_not_asked_for_fail(plain):
    strange = [dataclasses.replace(plain[0], sample=99)]
    for came in ([*plain, plain[0]], [*plain, *strange], []):
        assert compare(plain, came).outcome == "failed"
