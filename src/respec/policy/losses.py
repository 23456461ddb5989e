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
Sequences = Int[torch.Tensor, "C"]


@dataclass(frozen=True)
class Bounds:
    """The numbers the factors take: ratio clipped to [1 - clip_low, 1 + clip_high], correction weights to correction_cap; `dual_clip`,
    above 1, bounds the loss of a bad token from above (None: it does not)."""

    clip_low: float
    clip_high: float
    correction_cap: float
    dual_clip: float | None = None


@dataclass(frozen=True)
class Counts:
    """What a *whole mini-batch* is divided by, so that its loss does not depend on how it is cut into micro-batches.

    sequences and tokens: those in the loss; constant: tokens, the divisor of aggregation `constant`; budget: this mini-batch's share of a
    step's budget of tokens, whether or not there were as many.
    """

    sequences: int
    tokens: int
    constant: int
    budget: float = 1.0


@dataclass(frozen=True)
class Terms:
    """Per token: the surrogate's loss, the ratio theta / old, and whether clipping took the gradient away."""

    loss_C: Tokens
    ratio_C: Tokens
    clipped_C: Bool[torch.Tensor, "C"]


def ppo_clip(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Terms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = theta / old (PPO, arXiv 1707.06347, equation 7; asymmetric: DAPO, arXiv 2503.14476).

    With dual_clip c, at A < 0 no less than -c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    return _clipped(torch.exp(theta_C - old_C), advantage_C, bounds)


def gspo(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Terms:
    """PPO's clip with one ratio a sequence, exp of the mean of log theta / old over its tokens (GSPO, arXiv 2507.18071, equations 5 to 7).

    With aggregation `sequence_mean` it is the paper's. A sequence's tokens must all be present.
    """
    length_S = torch.bincount(sequence_C).to(theta_C)
    gap_S = torch.zeros_like(length_S).index_add(0, sequence_C, theta_C - old_C) / length_S.clamp(min=1)
    return _clipped(torch.exp(gap_S)[sequence_C], advantage_C, bounds)


def _clipped(ratio_C: Tokens, advantage_C: Tokens, bounds: Bounds) -> Terms:
    bounded_C = ratio_C.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    loss_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
    above_C = (ratio_C > 1 + bounds.clip_high) & (advantage_C > 0)
    below_C = (ratio_C < 1 - bounds.clip_low) & (advantage_C < 0)
    if bounds.dual_clip is not None:
        far_C = (ratio_C > bounds.dual_clip) & (advantage_C < 0)
        loss_C = torch.where(far_C, -bounds.dual_clip * advantage_C, loss_C)
        above_C |= far_C
    return Terms(loss_C, ratio_C.detach(), above_C | below_C)


def cispo(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Terms:
    """-clip(r, 1 - low, 1 + high) A log theta, the clipped ratio a constant: no token loses its gradient (MiniMax-M1, arXiv 2506.13585,
    equations 4 and 5)."""
    ratio_C = torch.exp(theta_C - old_C).detach()
    weight_C = ratio_C.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    return Terms(-weight_C * advantage_C * theta_C, ratio_C, weight_C != ratio_C)


def reinforce(theta_C: Tokens, old_C: Tokens, advantage_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Terms:
    """-A log theta (Williams 1992). No importance ratio: exact for one mini-batch and one epoch, biased beyond."""
    ratio_C = torch.exp(theta_C.detach() - old_C)
    return Terms(-advantage_C * theta_C, ratio_C, torch.zeros_like(ratio_C, dtype=torch.bool))


def sequence_mean(sequence_C: Sequences, counts: Counts) -> Tokens:
    """Mean over a sequence's tokens, then over sequences (GRPO). A sequence's tokens must all be present."""
    length_C = torch.bincount(sequence_C)[sequence_C]
    return 1.0 / (length_C.double() * counts.sequences)


def token_mean(sequence_C: Sequences, counts: Counts) -> Tokens:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476)."""
    return torch.full_like(sequence_C, 1.0 / counts.tokens, dtype=torch.float64)


def constant(sequence_C: Sequences, counts: Counts) -> Tokens:
    """Sum over a sequence's tokens divided by a constant, then mean over sequences (Dr. GRPO, arXiv 2503.20783)."""
    return torch.full_like(sequence_C, 1.0 / (counts.sequences * counts.constant), dtype=torch.float64)


def budget(sequence_C: Sequences, counts: Counts) -> Tokens:
    """Sum over all tokens divided by the step's budget of them (C3PO; Ring-lite, arXiv 2506.14731): one divisor, however long the answers."""
    return torch.full_like(sequence_C, 1.0 / counts.budget, dtype=torch.float64)


SURROGATES: dict[str, Callable[[Tokens, Tokens, Tokens, Sequences, Bounds], Terms]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
AGGREGATIONS: dict[str, Callable[[Sequences, Counts], Tokens]] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant,
    "budget": budget,
}
