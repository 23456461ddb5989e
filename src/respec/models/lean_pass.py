"""A training pass through the lean layers: what `packed_pass` takes on a CPU for the known families without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from respec.models.gradients import embedded, in_place
from respec.models.grids import Layout
from respec.models.lean_layers import Layer, Shape, Weights, weights_of
from respec.models.switch import Switch

FAMILIES = ("llama", "qwen2", "qwen3")

# off: `takes` says no, and transformers' modelling code trains
switch = Switch()


def takes(model: PreTrainedModel, taps: Sequence[int] = ()) -> bool:
    """Whether the lean layers compute what the model does, in float32: transformers' norms are of float32 whatever a model's dtype.

    They read layers' inputs, so a tap of the last norm's output is not theirs.
    """
    config: Any = model.config
    known = config.model_type in FAMILIES and getattr(config, "hidden_act", "") == "silu"
    here = model.device.type == "cpu" and model.dtype == torch.float32
    if not switch.on or not known or not here or any(tap >= config.num_hidden_layers for tap in taps):
        return False
    return all(weights is not None for weights in _weights(model))


def lean_pass(
    model: PreTrainedModel,
    token_N: Int[Tensor, "N"],
    position_N: Int[Tensor, "N"],
    layout: Layout,
    taps: Sequence[int],
    products: torch.dtype | None,
) -> tuple[Float[Tensor, "N E"], tuple[Float[Tensor, "N E"], ...]]:
    """As `packed_pass`; the layers whose `gradient_checkpointing` is set keep their input alone."""
    body: Any = model.base_model
    attention = body.layers[0].self_attn
    x_NE = embedded(token_N, body.embed_tokens.weight)
    cos, sin = (table[0, :, None].chunk(2, dim=-1)[0] for table in body.rotary_emb(x_NE[None], position_N[None]))
    seen: dict[int, Tensor] = {}
    for index, (layer, weights) in enumerate(zip(body.layers, _weights(model), strict=True)):
        if index in taps:
            seen[index] = x_NE.detach()
        shape = Shape(
            attention.head_dim,
            body.norm.variance_epsilon,
            attention.scaling,
            products,
            not layer.gradient_checkpointing,
            in_place(),
        )
        assert weights is not None, "asked of `takes` before"
        x_NE = _layer(x_NE, cos, sin, layout, shape, *weights)
    return body.norm(x_NE), tuple(seen[tap] for tap in taps)


def _layer(*arguments: Any) -> Float[Tensor, "N E"]:
    return Layer.apply(*arguments)  # pyright: ignore[reportReturnType]


def _weights(model: PreTrainedModel) -> list[Weights | None]:
    body: Any = model.base_model
    return [weights_of(layer) for layer in body.layers]
