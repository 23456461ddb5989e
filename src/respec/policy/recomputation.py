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
from respec.models.lean_pass import takes

# Kept activations may take this share of the memory that is free: what a backward pass makes on its way needs some, too.
FREE_SHARE = 0.5
# Bytes. Memory given back has to be faulted in again, a quarter of a second a gigabyte, which a small model's update would feel.
WORTH_GIVING_BACK = 2**26
# Bytes, on a CPU: an eighth of what SmolLM2 keeps of its weights, gradients and moments. Products of so many tokens are as fast as of more.
ACTIVATIONS = 2**28
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


def is_wanted(
    setting: Literal["auto"] | bool,
    model: PreTrainedModel,
    tokens: int,
    products: torch.dtype | None = None,
    budget: float | None = None,
) -> bool:
    """The setting, or for `auto` whether a pass over that many tokens would keep more than `budget` bytes, or half of the memory that is free."""
    if setting != "auto":
        return setting
    kept = activation_bytes(model, tokens, products)
    return kept > FREE_SHARE * free_bytes(model.device) or (budget is not None and kept > budget)


def tokens_within(budget: float | None, model: PreTrainedModel, most: int, products: torch.dtype | None = None) -> int:
    """How many packed tokens a pass may have, `most` at the utmost, to keep no more than `budget` bytes; None: `ACTIVATIONS` on a CPU.

    It depends on nothing of the moment, since the bits of a gradient depend on how it is cut.
    """
    if budget is None and model.device.type != "cpu":
        return most
    return max(1, min(most, int((budget or ACTIVATIONS) // activation_bytes(model, 1, products))))


def activation_bytes(model: PreTrainedModel, tokens: int, products: torch.dtype | None = None) -> int:
    """What a forward pass over packed tokens keeps for its backward pass, without the head; an estimate, from above: on SmolLM2 it is 6 % more.

    A lean layer keeps its input and the residual in the middle, and in the dtype of `products` queries, keys, values, what attention makes of
    them, and the MLP's gate and up. Of transformers' code a layer keeps for each token: twice three vectors of the hidden size at its norms and one where attention ends;
    queries and what attention makes of them, both padded; keys and values, padded; four vectors of the MLP's inner size.
    """
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, shared = config.num_attention_heads * width, config.num_key_value_heads * width
    size = next(model.parameters()).element_size()
    if takes(model):
        inner = 2 * heads + 2 * shared + 2 * config.intermediate_size
        whole = 2 * config.hidden_size + config.num_attention_heads + 2
        a_layer = whole * size + inner * (products.itemsize if products else size)
        last_norm = 4 * config.hidden_size * size
        return tokens * (config.num_hidden_layers * a_layer + last_norm)
    a_token = 7 * config.hidden_size + 3 * heads + 3 * shared + 4 * config.intermediate_size
    return tokens * config.num_hidden_layers * a_token * size


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
