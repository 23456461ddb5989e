"""Activations computed a second time instead of kept (gradient checkpointing: Chen et al. 2016, arXiv 1604.06174): a layer keeps its input alone.

It costs a second forward pass, and changes no bit of an update: so whether it is worth it may be asked anew each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from respec.models.heap import give_back

# Kept activations may take this share of the memory that is free: what a backward pass makes on its way needs some, too.
FREE_SHARE = 0.5
# Bytes. Memory given back has to be faulted in again, a quarter of a second a gigabyte, which a small model's update would feel.
WORTH_GIVING_BACK = 2**30
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@contextlib.contextmanager
def recomputing(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """Forward passes within keep each layer's input only, when `wanted`; the backward pass may come later."""
    layers: list[Any] = [
        module for module in model.modules() if wanted and isinstance(module, GradientCheckpointingLayer)
    ]
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        # transformers asks a layer, not what is in it, whether it is in training
        layer.gradient_checkpointing = layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def is_wanted(setting: Literal["auto"] | bool, model: PreTrainedModel, tokens: int) -> bool:
    """The setting, or for `auto` whether a pass over that many tokens would keep more than half of the memory that is free."""
    if setting != "auto":
        return setting
    return activation_bytes(model, tokens) > FREE_SHARE * free_bytes(model.device)


def activation_bytes(model: PreTrainedModel, tokens: int) -> int:
    """What a forward pass over packed tokens keeps for its backward pass, without the head; an estimate, from above: on SmolLM2 it is 6 % more.

    A layer keeps for each token, of transformers' code: twice three vectors of the hidden size at its norms and one where attention ends;
    queries and what attention makes of them, both padded; keys and values, padded; four vectors of the MLP's inner size.
    """
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, shared = config.num_attention_heads * width, config.num_key_value_heads * width
    a_token = 7 * config.hidden_size + 3 * heads + 3 * shared + 4 * config.intermediate_size
    return tokens * config.num_hidden_layers * a_token * next(model.parameters()).element_size()


def free_activations(model: PreTrainedModel, tokens: int) -> None:
    """After passes over that many tokens: what glibc would keep of their memory goes back to the system, where it is much."""
    if activation_bytes(model, tokens) > WORTH_GIVING_BACK:
        give_back()


def free_bytes(device: torch.device) -> int:
    """Memory that is free: the GPU's, or the machine's within the limit of the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(path.read_text()) for path in LIMITS)
        free = min(free, limit - used)
    return free
