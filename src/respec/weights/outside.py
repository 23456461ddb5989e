"""A policy's weights for an engine that is no part of this process: by the names of a checkpoint, in the dtype that it decodes in."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from respec.models.adapted import is_adapted, plain_state
from respec.models.decoder import decode_dtype
from respec.models.load import Policy


@runtime_checkable
class Outside(Protocol):
    """What takes weights by name, and lets nothing computed by older ones be read again."""

    def push(self, weights: dict[str, torch.Tensor], version: int) -> None: ...


def by_name(policy: Policy, dtype: str) -> dict[str, torch.Tensor]:
    """Copies on the CPU, an adapter merged in before they are rounded; tied weights under the first of their names."""
    model, kind = policy.model, decode_dtype(dtype, torch.device(policy.model.device))
    state = plain_state(model) if is_adapted(model) else iter(model.state_dict().items())
    # a weight that is made when it is reached may lie where another has lain: only the model's own can be tied
    own = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    seen, found = set[int](), dict[str, torch.Tensor]()
    for name, weight in state:
        if own.get(name) in seen:
            continue
        if name in own:
            seen.add(own[name])
        found[name] = weight.detach().to("cpu", kind, copy=True).contiguous()
    return found
