"""The drafter learner: a head's own AdamW on examples that carry no gradient, so that the policy's stays what it is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from respec.drafter.agreement import Agreement, agreement, together
from respec.drafter.examples import Example, passes
from respec.drafter.losses import BY_TOKEN, LOSSES, e2e_tv
from respec.drafter.unroll import Unrolled, unroll
from respec.errors import ConfigError, NonFiniteError
from respec.models.decoder import decode_dtype
from respec.models.eagle import EagleHead
from respec.types import Mode


@dataclass(frozen=True)
class LearnerSettings:
    """How a head learns. `depths` unrolled steps, the loss of depth k counting `depth_decay`^k; `tokens` padded tokens to a forward pass.

    `mixed_precision`: products in bfloat16 where the hardware has it and the head is float32; the weights stay float32.
    """

    loss: str = "kl"
    depths: int = 5
    depth_decay: float = 0.8
    lr: float = 1e-3
    grad_clip: float = 0.5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    temperature: float = 1.0
    tokens: int = 2048
    mixed_precision: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError for a loss that there is not."""
        if self.loss not in LOSSES:
            raise ConfigError(f"there is no drafter loss '{self.loss}'; known are {', '.join(LOSSES)}")


@dataclass(frozen=True)
class DrafterUpdateStats:
    """What one step did. On what was learned from, before the step: `overlap_K` is the mean Σ min(p, q) by depth, `agreement` how far drafts
    would have stood, by mode."""

    loss: float
    grad_norm: float
    lr: float
    overlap_K: tuple[float, ...]
    agreement: Mapping[Mode, Agreement]
    tokens: int
    wall_s: float


class DrafterLearner:
    """Trains a head in place; its embedding stays frozen. `updates` counts steps: the drafter's version."""

    def __init__(self, head: EagleHead, settings: LearnerSettings) -> None:
        self.head, self.updates = head, 0
        self._settings = settings
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
        self._trained = trained

    def step(self, examples: Sequence[Example], lr: float | None = None) -> DrafterUpdateStats:
        """One optimizer step on all the examples together, at the settings' rate unless another is given.

        Raises NonFiniteError, with the weights as they were, for a loss or gradient that is not finite.
        """
        began = time.perf_counter()
        total = sum(e.weight * len(e.token_CK) for e in examples)
        loss, sums, counts, seen = 0.0, 0.0, 0.0, list[Mapping[Mode, Agreement]]()
        try:
            for part in passes([e.length for e in examples], self._settings.tokens):
                unrolled = unroll(
                    self.head, [examples[i] for i in part], self._settings.depths, self._settings.temperature
                )
                share = drafter_loss(unrolled, self._settings.loss, self._settings.depth_decay) / max(total, 1e-12)
                share.backward()
                loss += share.item()
                overlaps, exists = unrolled.overlaps()
                sums, counts = sums + overlaps.detach().double().sum(0), counts + exists.sum(0)
                seen.append(agreement(unrolled))
            norm = float(nn.utils.clip_grad_norm_(self._trained, self._settings.grad_clip))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteError(
                    f"drafter update: the loss is {loss}, its gradient's norm {norm}; the step was not taken and the weights are as before"
                )
            rate = self._settings.lr if lr is None else lr
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()
        self.updates += 1
        return DrafterUpdateStats(
            loss, norm, rate, _mean(sums, counts), together(seen), sum(e.length for e in examples),
            time.perf_counter() - began,
        )  # fmt: skip


def drafter_loss(unrolled: Unrolled, name: str, depth_decay: float) -> Float[Tensor, ""]:
    """Σ over anchors of weight times distance; the depths' distances averaged with weights depth_decay^k (`e2e_tv` is over whole drafts)."""
    if name == "e2e_tv":
        return (unrolled.weight_A * e2e_tv(*unrolled.overlaps())).sum()
    scale = [depth_decay**k for k in range(len(unrolled.depths))]
    terms = [
        share / sum(scale) * (unrolled.weight_A[depth.anchor_N] * BY_TOKEN[name](depth.p_NB, depth.logq_NB)).sum()
        for share, depth in zip(scale, unrolled.depths, strict=True)
    ]
    return torch.stack(terms).sum()


def precision(head: EagleHead, mixed: bool) -> torch.autocast:
    """The context in which a head's products are bfloat16, where that is wanted and the machine multiplies it."""
    weight = head.lm_head.weight
    usable = weight.dtype == torch.float32 and decode_dtype("auto", weight.device) == torch.bfloat16
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=mixed and usable)


@torch.no_grad()
def acceptance(
    head: EagleHead, examples: Sequence[Example], depths: int, temperature: float, tokens: int = 2048
) -> tuple[tuple[float, ...], dict[Mode, Agreement]]:
    """Mean Σ min(p, q) by depth: the probability that a draft token stands in `rejection`, those before it being the text's own; and how
    far whole drafts stand, by mode."""
    sums, counts, seen = 0.0, 0.0, list[Mapping[Mode, Agreement]]()
    for part in passes([e.length for e in examples], tokens):
        with precision(head, True):
            unrolled = unroll(head, [examples[i] for i in part], depths, temperature)
        overlaps, exists = unrolled.overlaps()
        sums, counts = sums + overlaps.double().sum(0), counts + exists.sum(0)
        seen.append(agreement(unrolled))
    return _mean(sums, counts), together(seen)


def _mean(sums: Tensor | float, counts: Tensor | float) -> tuple[float, ...]:
    assert isinstance(sums, Tensor) and isinstance(counts, Tensor), "there was nothing to learn from"
    return tuple((sums / counts.clamp_min(1)).tolist())
