"""The drafter learner: a head's own AdamW on examples that carry no gradient, so that the policy's stays what it is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from respec.drafter.agreement import MODES
from respec.drafter.examples import Example, passes
from respec.drafter.judge import Judgement, judged, merged, precision
from respec.drafter.losses import BY_TOKEN, LOSSES, e2e_tv
from respec.drafter.unroll import Unrolled, unroll
from respec.errors import CheckpointError, ConfigError, NonFiniteError
from respec.models.eagle import EagleHead
from respec.models.moments import moments, set_moments
from respec.types import Mode


@dataclass(frozen=True)
class LearnerSettings:
    """How a head learns. `depths` unrolled steps, the loss of depth k counting `depth_decay`^k; `tokens` padded tokens to a forward pass.

    `mixed_precision`: products in bfloat16 where the hardware has it and the head is float32; the weights stay float32.
    `modes` are those in which it is judged how far drafts stand.
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
    modes: tuple[Mode, ...] = MODES

    def __post_init__(self) -> None:
        """Raises ConfigError for a loss that there is not."""
        if self.loss not in LOSSES:
            raise ConfigError(f"there is no drafter loss '{self.loss}'; known are {', '.join(LOSSES)}")


@dataclass(frozen=True)
class DrafterUpdateStats:
    """What one step did. `seen` is how the head stood to what was learned from, before the step; None where that was not asked for."""

    loss: float
    grad_norm: float
    lr: float
    seen: Judgement | None
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
        self._named = {name: p for name, p in head.named_parameters() if p.requires_grad}

    def update(
        self, parts: Sequence[Sequence[Example]], lr: float | None = None, judges: bool = True
    ) -> list[DrafterUpdateStats]:
        """An optimizer step on each of the parts in turn, all or nothing; with `judges` the first is judged, before any is taken.

        Raises NonFiniteError, with the weights and the optimizer as they were before the first.
        """
        # a step is all or nothing by itself
        held = self.state_dict().items() if len(parts) > 1 else ()
        before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held}
        try:
            return [self.step(part, lr, judges and i == 0) for i, part in enumerate(parts)]
        except NonFiniteError:
            if before:
                self.load_state_dict(before)
            raise

    def step(self, examples: Sequence[Example], lr: float | None = None, judges: bool = True) -> DrafterUpdateStats:
        """One optimizer step on all the examples together, at the settings' rate unless another is given.

        Raises NonFiniteError, with the weights as they were, for a loss or gradient that is not finite.
        """
        began = time.perf_counter()
        total = sum(e.weight * len(e.token_CK) for e in examples)
        loss, seen = 0.0, list[Judgement]()
        try:
            for part in passes([e.length for e in examples], self._settings.tokens):
                with precision(self.head, self._settings.mixed_precision):
                    unrolled = unroll(
                        self.head, [examples[i] for i in part], self._settings.depths, self._settings.temperature
                    )
                share = drafter_loss(unrolled, self._settings.loss, self._settings.depth_decay) / max(total, 1e-12)
                share.backward()
                loss += share.item()
                if judges:
                    seen.append(judged(unrolled, self._settings.modes))
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
        before, tokens = merged(seen) if seen else None, sum(e.length for e in examples)
        return DrafterUpdateStats(loss, norm, rate, before, tokens, time.perf_counter() - began)

    def state_dict(self) -> dict[str, Tensor | int]:
        """The trained weights, the optimizer's moments and the number of steps: flat, for safetensors. The embedding never changes.

        The tensors share memory with the head and the optimizer: write or copy them before the next step.
        """
        weights = {f"weight.{name}": parameter.detach() for name, parameter in self._named.items()}
        return {"updates": self.updates, **weights, **moments(self._optimizer, self._named)}

    def load_state_dict(self, state: Mapping[str, Tensor | int]) -> None:
        """Takes up a saved state; the learner then goes on bit for bit. Raises CheckpointError if it is of another head."""
        taken = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        updates = int(state.get("updates", -1))
        weights = {name: taken.pop(key) for name in self._named if (key := f"weight.{name}") in taken}
        own = {name: parameter.shape for name, parameter in self._named.items()}
        if updates < 0 or own != {name: weight.shape for name, weight in weights.items()}:
            raise CheckpointError(
                "the checkpoint's drafter is of another shape than the head of speculation.drafter_path; resume with the head that the "
                "run began with"
            )
        set_moments(self._optimizer, self._named, taken, updates)
        self.updates = updates
        with torch.no_grad():
            for name, weight in weights.items():
                self._named[name].copy_(weight)


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
