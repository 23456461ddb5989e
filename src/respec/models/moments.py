"""What an optimizer of the AdamW family keeps of each weight of a model, by the weight's name: for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from respec.errors import CheckpointError

# What AdamW keeps of each weight; the 8-bit ones, by its size, some of these (and tables that are the same for all).
MOMENTS = ("exp_avg", "exp_avg_sq")
EIGHT_BIT = ("state1", "state2", "absmax1", "absmax2")


def moments(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """What the optimizer keeps of each weight, as `moment.weight`; the tensors are the optimizer's own."""
    kept = {name: optimizer.state.get(parameter, {}) for name, parameter in named.items()}
    return {
        f"{moment}.{name}": of[moment] for name, of in kept.items() for moment in MOMENTS + EIGHT_BIT if moment in of
    }


def set_moments(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor], steps: int
) -> None:
    """Takes saved moments up after `steps` optimizer steps, bit for bit. Raises CheckpointError if they are of other weights or another kind."""
    optimizer.state.clear()
    if steps:
        _begin(optimizer, steps)
    own = moments(optimizer, named)
    if {key: value.shape for key, value in own.items()} != {key: value.shape for key, value in saved.items()}:
        odd = sorted(set(own) ^ set(saved)) or ["a shape"]
        raise CheckpointError(
            f"the optimizer state does not fit the model or policy.optimizer ({len(odd)} differences, first: {odd[0]}); "
            "resume with the configuration and the version of respec that wrote it"
        )
    for key, value in own.items():
        value.copy_(saved[key])


def _begin(optimizer: Any, steps: int) -> None:
    """Gives every weight the moments that it has before a first step, and the number of steps taken."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, weight in enumerate(group["params"]):
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[weight] = {name: torch.zeros_like(weight) for name in MOMENTS}
                optimizer.state[weight]["step"] = torch.tensor(float(steps), device=weight.device)
            else:
                optimizer.init_state(group, weight, group_index, index)
                optimizer.state[weight]["step"] = steps
