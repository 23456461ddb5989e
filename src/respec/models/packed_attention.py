"""Training attention over sequences packed end to end, plugged into transformers' modelling code.

A model whose attention implementation is `respec_packed` attends as transformers' `sdpa` does, masks included, until a call
hands it a `Layout`: then the tokens of one flat row are several sequences, each causal in itself and blind to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from respec.errors import ModelError
from respec.models.grids import Grid, Layout, layout
from respec.models.lean_pass import lean_pass, takes

PACKED = "respec_packed"


class _Move(torch.autograd.Function):
    """Rows to the grid (`to_grid`) or back. Each direction's gradient is the other's move, so no scatter-add is needed.

    That holds because padding gets no gradient: a padded key comes after every real query of its sequence, and a padded
    query's output is dropped.
    """

    @staticmethod
    def forward(ctx: Any, row_KE: torch.Tensor, grid: Grid, to_grid: bool) -> torch.Tensor:
        ctx.grid, ctx.to_grid = grid, to_grid
        return row_KE.index_select(0, grid.flat_SL if to_grid else grid.padded_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        grid: Grid = ctx.grid
        if ctx.to_grid:
            return gradient.index_select(0, grid.padded_N), None, None
        full = gradient.new_zeros(len(grid.flat_SL), *gradient.shape[1:])
        return full.index_copy_(0, grid.padded_N, gradient), None, None


def _packed_attention(
    module: nn.Module,
    query: Float[torch.Tensor, "1 H N D"],
    key: Float[torch.Tensor, "1 K N D"],
    value: Float[torch.Tensor, "1 K N D"],
    attention_mask: torch.Tensor | None,
    packed: Layout | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. Returns [1, N, H, D]; without `packed` it is transformers' own `sdpa`."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    tokens = [grid.tokens for grid in packed]
    # Token by token [N, heads * D], and cut by `split`, whose gradient is one concatenation.
    query_G, key_G, value_G = (heads[0].transpose(0, 1).flatten(1).split(tokens) for heads in (query, key, value))
    mixed = [
        _attend(*rows, width=query.shape[3], scaling=scaling)
        for rows in zip(query_G, key_G, value_G, packed, strict=True)
    ]
    return torch.cat(mixed).view(1, -1, query.shape[1], query.shape[3]), None


def _attend(
    query_NE: Float[torch.Tensor, "N H*D"],
    key_NE: Float[torch.Tensor, "N K*D"],
    value_NE: Float[torch.Tensor, "N K*D"],
    grid: Grid,
    width: int,
    scaling: float | None,
) -> Float[torch.Tensor, "N H*D"]:
    """Causal attention within each sequence of one grid, with heads of `width` D."""

    def to_grid(row_NE: torch.Tensor) -> Float[torch.Tensor, "S heads L D"]:
        return _Move.apply(row_NE, grid, True).view(grid.sequences, grid.longest, -1, width).transpose(1, 2)

    query, key, value = to_grid(query_NE), to_grid(key_NE), to_grid(value_NE)
    share = query.shape[1] // key.shape[1]
    # The CPU's fused kernel reads shared heads as they are; on CUDA the float32 one does not, and the fallback needs S H L L.
    grouped = share > 1 and query.device.type == "cpu"
    if share > 1 and not grouped:
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return _Move.apply(mixed.transpose(1, 2).reshape(grid.sequences * grid.longest, -1), grid, False)


# transformers looks implementations up by name in these process-wide tables; ours is added once, at import, and replaces nothing.
AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switches a model to `respec_packed`. Unpacked calls give what they gave with `sdpa`."""
    model.set_attn_implementation(PACKED)


def packed_hidden(
    model: PreTrainedModel,
    token_N: Int[torch.Tensor, "N"],
    position_N: Int[torch.Tensor, "N"],
    start_S: Int[torch.Tensor, "S+1"],
) -> Float[torch.Tensor, "N E"]:
    """Last hidden states of packed sequences, after the final norm: what the language-model head reads. Raises as `packed_pass`."""
    return packed_pass(model, token_N, position_N, start_S)[0]


def packed_pass(
    model: PreTrainedModel,
    token_N: Int[torch.Tensor, "N"],
    position_N: Int[torch.Tensor, "N"],
    start_S: Int[torch.Tensor, "S+1"],
    taps: Sequence[int] = (),
    products: torch.dtype | None = None,
) -> tuple[Float[torch.Tensor, "N E"], tuple[Float[torch.Tensor, "N E"], ...]]:
    """Last hidden states of packed sequences, and those before the layers `taps`, without gradient: looking on adds nothing to the graph.

    Matrix products are in `products`, None for the model's dtype. On a CPU the lean layers compute it where they can.
    Raises ModelError when the model does not use packed attention (its result would be silently wrong).
    """
    if model.config._attn_implementation != PACKED:
        raise ModelError(
            f"the model's attention is '{model.config._attn_implementation}', which cannot keep packed sequences apart; "
            "load it with load_policy, or call use_packed_attention(model) first"
        )
    if takes(model, taps):
        return lean_pass(model, token_N, position_N, layout(start_S), taps, products)
    # A mask of four dimensions is handed through as it is: so none of N x N is built, and the packed attention reads none.
    no_mask = torch.zeros(1, 1, 1, 1, device=token_N.device)
    with torch.autocast(model.device.type, products, enabled=products is not None):
        output = model.base_model(
            input_ids=token_N[None],
            position_ids=position_N[None],
            attention_mask=no_mask,
            use_cache=False,
            output_hidden_states=bool(taps),
            packed=layout(start_S),
        )
    return output.last_hidden_state[0], tuple(output.hidden_states[tap][0].detach() for tap in taps)
