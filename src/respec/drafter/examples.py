"""What a head learns from: a completion's tokens, the target's hidden states along it, and the target's distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from respec.models.heap import give_back
from respec.models.packed_attention import packed_pass
from respec.types import Rollout, Sampling

# Positions whose logits are held at once.
ROWS = 128


@dataclass(frozen=True)
class Example:
    """One completion behind its prompt. Made by `capture` or a `Watcher`, read by the learner; nothing in it has a gradient.

    `taps_LT` are the target's hidden states before the tapped layers, side by side. Row c of `token_CK` and `p_CK` has the target's most probable
    tokens for completion token c and their probabilities, processed as in sampling; what is missing to 1 lies on all others.
    `version` is the update counter of the policy whose states and laws they are.
    """

    token_L: Int[Tensor, "L"]
    taps_LT: Float[Tensor, "L taps*hidden"]
    prompt: int
    token_CK: Int[Tensor, "C K"]
    p_CK: Float[Tensor, "C K"]
    weight: float = 1.0
    version: int = 0

    @property
    def length(self) -> int:
        return len(self.token_L)

    @property
    def finite(self) -> bool:
        """Whether anything can be learned from it: a single hidden state or law that is not finite spoils every batch it is in."""
        return bool(self.taps_LT.isfinite().all() and self.p_CK.isfinite().all())

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return sum(part.nbytes for part in (self.token_L, self.taps_LT, self.token_CK, self.p_CK))


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    taps: Sequence[int],
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    top: int = 64,
    weights: Sequence[float] = (),
    tokens_per_pass: int = 2048,
    on_pass: Callable[[int], None] | None = None,
) -> list[Example]:
    """Examples from rollouts, in their order, by the policy's own forward pass over them packed.

    `top` is K. Hidden states are kept in bfloat16, as a float64 policy's in float64. Empty completions are left out. `on_pass` is told after
    each pass how many completions are done.
    """
    kept = [index for index, rollout in enumerate(rollouts) if len(rollout.token_T)]
    found: dict[int, Example] = {}
    for part in passes([len(rollouts[i].prompt.token_ids) + len(rollouts[i].token_T) for i in kept], tokens_per_pass):
        chosen = [kept[i] for i in part]
        made = _capture(
            [rollouts[i] for i in chosen],
            model,
            taps,
            sampling,
            top,
            [weights[i] if len(weights) else 1.0 for i in chosen],
        )
        found.update(zip(chosen, made, strict=True))
        give_back()
        if on_pass is not None:
            on_pass(len(found))
    return [found[i] for i in kept]


def passes(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, cut so that each part padded to its longest stays within `budget` cells."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > budget:
            parts.append([])
        parts[-1].append(index)
    return parts


def _capture(
    rollouts: Sequence[Rollout],
    model: PreTrainedModel,
    taps: Sequence[int],
    sampling: Sampling,
    top: int,
    weights: Sequence[float],
) -> list[Example]:
    tokens = [tokens_of(rollout) for rollout in rollouts]
    start = np.concatenate([[0], np.cumsum([len(part) for part in tokens])])
    device = model.device
    token, position = torch.cat(tokens).to(device), torch.cat([torch.arange(len(part)) for part in tokens]).to(device)
    hidden_NE, tap_NE = packed_pass(model, token, position, torch.from_numpy(start).to(device), taps)
    stored = torch.float64 if hidden_NE.dtype == torch.float64 else torch.bfloat16
    stored_NT = torch.cat([tap.to(stored) for tap in tap_NE], dim=1)
    before_N = torch.cat([
        torch.arange(begin + len(r.prompt.token_ids) - 1, begin + len(part) - 1)
        for r, part, begin in zip(rollouts, tokens, start[:-1], strict=True)
    ]).to(device)  # fmt: skip
    ids_NK, p_NK = _top_laws(hidden_NE, before_N, model.get_parameter("lm_head.weight"), sampling, top)
    sizes = [len(r.token_T) for r in rollouts]
    return [
        Example(own, stored_NT[begin : begin + len(own)], len(r.prompt.token_ids), ids, p, weight)
        for r, own, begin, weight, ids, p in zip(
            rollouts, tokens, start[:-1], weights, ids_NK.split(sizes), p_NK.split(sizes), strict=True
        )
    ]


def _top_laws(
    hidden_NE: Float[Tensor, "N E"], at_C: Int[Tensor, "C"], head_VE: Float[Tensor, "V E"], sampling: Sampling, top: int
) -> tuple[Int[Tensor, "C K"], Float[Tensor, "C K"]]:
    """`top_law` of the positions `at_C`, a few at a time."""
    top = min(top, len(head_VE))
    exact = torch.promote_types(hidden_NE.dtype, torch.float32)
    ids_CK = torch.empty(len(at_C), top, dtype=torch.int32, device=hidden_NE.device)
    p_CK = torch.empty(len(at_C), top, dtype=exact, device=hidden_NE.device)
    for first in range(0, len(at_C), ROWS):
        part = slice(first, first + ROWS)
        ids_CK[part], p_CK[part] = top_law(hidden_NE[at_C[part]] @ head_VE.T, sampling, top)
    return ids_CK, p_CK


def tokens_of(rollout: Rollout) -> Int[Tensor, "L"]:
    """Prompt and completion."""
    return torch.tensor([*rollout.prompt.token_ids, *rollout.token_T.tolist()])


def top_law(
    logit_CV: Float[Tensor, "C V"], sampling: Sampling, top: int
) -> tuple[Int[Tensor, "C K"], Float[Tensor, "C K"]]:
    """The `top` most probable tokens and their probabilities, after the temperature (0 is read as 1), top-k, top-p and min-p.

    A truncation that keeps more than `top` tokens keeps those.
    """
    wide_CV = logit_CV.to(torch.promote_types(logit_CV.dtype, torch.float32))
    return truncated(torch.log_softmax(wide_CV / (sampling.temperature or 1.0), 1), sampling, top)


def truncated(
    logp_CV: Float[Tensor, "C V"], sampling: Sampling, top: int
) -> tuple[Int[Tensor, "C K"], Float[Tensor, "C K"]]:
    """The same from log-probabilities at the sampling temperature."""
    logp_CK, token_CK = logp_CV.topk(min(top, logp_CV.shape[1]), dim=1)
    p_CK = logp_CK.exp()
    if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
        stays_CK = p_CK >= sampling.min_p * p_CK[:, :1]
        within_C = 1.0
        if sampling.top_k:
            stays_CK[:, sampling.top_k :] = False
            within_C = p_CK[:, : sampling.top_k].sum(dim=1, keepdim=True)
        stays_CK &= p_CK.cumsum(1) - p_CK < sampling.top_p * within_C
        stays_CK[:, 0] = True
        p_CK = torch.where(stays_CK, p_CK, 0.0)
        p_CK = p_CK / p_CK.sum(dim=1, keepdim=True)
    return token_CK, p_CK
