"""What any engine can be held to, whether or not it shares our seeds: its tokens' distribution and its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from respec.certify.distribution import first_tokens, uniform_transforms
from respec.certify.finding import Finding
from respec.certify.honesty import honest_logprobs
from respec.certify.protocol import CertifiedEngine
from respec.certify.reference import Reference
from respec.types import Ask, Plan, Rollout, Sampling


@dataclass(frozen=True)
class Samples:
    """What is drawn for the statistics: completions of some length, and many very short ones for their first tokens.

    A short one has two tokens, so that there is something to be drafted. Sampling is by temperature alone: where a truncation cuts, rounding
    decides, which no test of a distribution could tell from a bias.
    """

    asks: tuple[Ask, ...]
    sampling: Sampling
    short_asks: tuple[Ask, ...]
    short: Sampling


def certify_sampler(
    subject: str,
    engine: CertifiedEngine,
    plan: Plan,
    samples: Samples,
    reference: Reference,
    dtype: torch.dtype,
    allowed: float,
) -> list[Finding]:
    """Draws from the engine under a plan and judges what came. `allowed` is what `honesty.allowed_mean` says for the engine's dtype."""
    drawn = engine(samples.asks, samples.sampling, plan)
    short = engine(samples.short_asks, samples.short, plan)
    return judge_samples(subject, drawn, short, samples.sampling.temperature, reference, dtype, allowed)


def judge_samples(
    subject: str,
    drawn: Sequence[Rollout],
    short: Sequence[Rollout],
    temperature: float,
    reference: Reference,
    dtype: torch.dtype,
    allowed: float,
) -> list[Finding]:
    """Checks c and d on completions that are there: `drawn` token by token, `short` by their first tokens."""
    judged = reference.judge(drawn, temperature)
    return [
        uniform_transforms(subject, judged),
        first_tokens(subject, short, reference, temperature),
        honest_logprobs(subject, judged, dtype, allowed),
    ]
