"""What the learner and the warm-up share: AdamW, its learning-rate schedule, and a step that refuses what is not finite."""

from __future__ import annotations

import math

import torch
from torch import nn

from respec.errors import NonFiniteError


def adamw(model: nn.Module, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over all trained weights; matrices decay, norms and biases do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def learning_rate(step: int, total: int, peak: float, warmup: int, decay: str, min_ratio: float = 0.0) -> float:
    """The rate of optimizer step `step` (from 0) of `total`: linear up to `peak` over `warmup` steps, then `decay`.

    decay: `constant`, or `linear` / `cosine` from `peak` down to `peak * min_ratio` at the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    gone = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    left = 1.0 - gone if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return peak * (min_ratio + (1.0 - min_ratio) * left)


def checked_step(optimizer: torch.optim.Optimizer, lr: float, grad_clip: float, loss: float, what: str) -> float:
    """One optimizer step at rate `lr` on the gradients at hand, clipped to global norm `grad_clip`; clears them.

    Returns the norm before clipping. Raises NonFiniteError, with the weights as they were, if loss or gradients are not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = float(nn.utils.clip_grad_norm_(parameters, grad_clip))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise NonFiniteError(
            f"{what}: the loss is {loss}, its gradient's norm {norm}; the step was not taken and the weights are as before. "
            "Lower the learning rate or grad_clip, or look at the rewards of this step"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm
