"""What the learner and the warm-up share: AdamW, its learning-rate schedule, and a step that refuses what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from respec.errors import ConfigError, NonFiniteError


def adamw(
    model: nn.Module, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999), kind: str = "adamw"
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over all trained weights; matrices decay, norms and biases do not. `kind`: a key of `OPTIMIZERS`.

    Raises ConfigError when the kind's library is not installed.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return OPTIMIZERS[kind](groups, betas)


def _fused(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def _eight_bit(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Moments at 8 bits, in blocks of 256 (Dettmers et al. 2022, arXiv 2110.02861)."""
    return _bitsandbytes().optim.AdamW8bit(groups, lr=0.0, betas=betas)


def _paged_eight_bit(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    """The same, in memory that CUDA moves to the host when the GPU is full (QLoRA, arXiv 2305.14314, section 3); on a CPU there is none."""
    return _bitsandbytes().optim.PagedAdamW8bit(groups, lr=0.0, betas=betas)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], tuple[float, float]], torch.optim.Optimizer]] = {
    "adamw": _fused,
    "adamw_8bit": _eight_bit,
    "paged_adamw_8bit": _paged_eight_bit,
}


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "policy.optimizer: 8-bit optimizers need the bitsandbytes library, which is not installed: pip install 'respec-rl[8bit]', or use 'adamw'"
        ) from None
    return bitsandbytes


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
