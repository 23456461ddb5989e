"""What a token's loss is weighed by because another policy sampled it than the learner takes for the old one: stale weights, another kernel,
another dtype. `old` is the trainer's own policy before the step, `rollout` what sampled; the weight is detached.

A token's weight is old / rollout; a sequence's the product over its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from respec.policy.losses import Bounds, Sequences, Tokens


def none(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """The rollouts are taken to be the old policy's."""
    return torch.ones_like(old_C)


def decoupled(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """old / rollout, always on and not bounded: with the surrogate's ratio theta / old, decoupled PPO (Hilton et al. 2021, arXiv 2110.00641,
    equation 5)."""
    return torch.exp(old_C - rollout_C)


def tis(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """min(old / rollout, cap): truncated importance sampling per token against engine/trainer mismatch (Yao et al. 2025)."""
    return decoupled(old_C, rollout_C, sequence_C, bounds).clamp(max=bounds.correction_cap)


def tis_sequence(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """The same with a sequence's weight, on all of its tokens: unbiased but for the cap, of more variance."""
    return _of_sequence(old_C, rollout_C, sequence_C).clamp(max=bounds.correction_cap)


def mis(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """old / rollout where it is at most the cap, 0 above: what the trainer finds far likelier than the engine did is left out (masked
    importance sampling, Liu et al. 2025)."""
    return _masked(decoupled(old_C, rollout_C, sequence_C, bounds), bounds)


def mis_sequence(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences, bounds: Bounds) -> Tokens:
    """The same with a sequence's weight: one beyond the cap takes the whole sequence out."""
    return _masked(_of_sequence(old_C, rollout_C, sequence_C), bounds)


def _masked(weight_C: Tokens, bounds: Bounds) -> Tokens:
    return torch.where(weight_C <= bounds.correction_cap, weight_C, 0.0)


def _of_sequence(old_C: Tokens, rollout_C: Tokens, sequence_C: Sequences) -> Tokens:
    count = int(sequence_C.max()) + 1 if len(sequence_C) else 0
    gap_S = torch.zeros(count, dtype=old_C.dtype, device=old_C.device).index_add(0, sequence_C, old_C - rollout_C)
    return torch.exp(gap_S)[sequence_C]


CORRECTIONS: dict[str, Callable[[Tokens, Tokens, Sequences, Bounds], Tokens]] = {
    "none": none,
    "decoupled": decoupled,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "mis": mis,
    "mis_sequence": mis_sequence,
}
