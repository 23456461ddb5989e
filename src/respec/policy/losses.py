"""Losses on flat token tensors: surrogate x aggregation x correction, each a pure function in a plain dict.

Three policies, always named: `rollout` (what sampled), `old` (before the step), `theta` (being trained). All log-probabilities
here are of the same distribution: where sampling was truncated (top-k / top-p / min-p), the caller subtracts the kept mass.
A loss to descend is  sum_C  weight_C * correction_C * surrogate_C,  where only the surrogate has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int

Tokens = Float[torch.Tensor, "C"]


@dataclass(frozen=True)
class Bounds:
    """The numbers the factors take: ratio clipped to [1 - clip_low, 1 + clip_high], correction weights to correction_cap."""

    clip_low: float
    clip_high: float
    correction_cap: float


@dataclass(frozen=True)
class Counts:
    """What a *whole mini-batch* is divided by, so that its loss does not depend on how it is cut into micro-batches.

    sequences and tokens: those in the loss; constant: tokens, the divisor of aggregation `constant`.
    """

    sequences: int
    tokens: int
    constant: int


@dataclass(frozen=True)
class Terms:
    """Per token: the surrogate's loss, the ratio theta / old, and whether clipping took the gradient away."""

    loss_C: Tokens
    ratio_C: Tokens
    clipped_C: Bool[torch.Tensor, "C"]


def ppo_clip(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, bounds: Bounds) -> Terms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = theta / old (PPO, arXiv 1707.06347, equation 7; asymmetric: DAPO)."""
    ratio_C = torch.exp(theta_C - old_C)
    bounded_C = ratio_C.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    loss_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
    above_C = (ratio_C > 1 + bounds.clip_high) & (advantage_C > 0)
    below_C = (ratio_C < 1 - bounds.clip_low) & (advantage_C < 0)
    return Terms(loss_C, ratio_C.detach(), above_C | below_C)


def reinforce(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, bounds: Bounds) -> Terms:
    """-A log theta (Williams 1992). No importance ratio: exact for one mini-batch and one epoch, biased beyond."""
    ratio_C = torch.exp(theta_C.detach() - old_C)
    return Terms(-advantage_C * theta_C, ratio_C, torch.zeros_like(ratio_C, dtype=torch.bool))


def sequence_mean(sequence_C: Int[torch.Tensor, "C"], counts: Counts) -> Tokens:
    """Mean over a sequence's tokens, then over sequences (GRPO). A sequence's tokens must all be present."""
    length_C = torch.bincount(sequence_C)[sequence_C]
    return 1.0 / (length_C.double() * counts.sequences)


def token_mean(sequence_C: Int[torch.Tensor, "C"], counts: Counts) -> Tokens:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476)."""
    return torch.full_like(sequence_C, 1.0 / counts.tokens, dtype=torch.float64)


def constant(sequence_C: Int[torch.Tensor, "C"], counts: Counts) -> Tokens:
    """Sum over a sequence's tokens divided by a constant, then mean over sequences (Dr. GRPO, arXiv 2503.20783)."""
    return torch.full_like(sequence_C, 1.0 / (counts.sequences * counts.constant), dtype=torch.float64)


def no_correction(old_C: Tokens, rollout_C: Tokens, bounds: Bounds) -> Tokens:
    """The rollouts are taken to be the old policy's."""
    return torch.ones_like(old_C)


def tis(old_C: Tokens, rollout_C: Tokens, bounds: Bounds) -> Tokens:
    """min(old / rollout, cap): truncated importance sampling per token against engine/trainer mismatch (Yao et al. 2025)."""
    return torch.exp(old_C - rollout_C).clamp(max=bounds.correction_cap)


SURROGATES: dict[str, Callable[[Tokens, Tokens, Tokens, Bounds], Terms]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}
AGGREGATIONS: dict[str, Callable[[Int[torch.Tensor, "C"], Counts], Tokens]] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant,
}
CORRECTIONS: dict[str, Callable[[Tokens, Tokens, Bounds], Tokens]] = {"none": no_correction, "tis": tis}
