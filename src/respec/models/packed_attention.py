"""Training attention over sequences packed end to end, plugged into transformers' modelling code.

A model whose attention implementation is `respec_packed` attends as transformers' `sdpa` does, masks included, until a call
hands it a `Layout`: then the tokens of one flat row are several sequences, each causal in itself and blind to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from respec.errors import ModelError

PACKED = "respec_packed"


@dataclass(frozen=True)
class Layout:
    """Where each of N flat tokens sits in a padded [S, L] grid, and back; made once a forward pass, read by every layer.

    `padded_N` is the grid cell of each token; `flat_SL` the token of each grid cell, where padding repeats the sequence's last.
    """

    padded_N: Int[torch.Tensor, "N"]
    flat_SL: Int[torch.Tensor, "S*L"]
    sequences: int
    longest: int


def layout(start_S: Int[torch.Tensor, "S+1"]) -> Layout:
    """The grid for sequences that begin at `start_S[:-1]` and end before `start_S[1:]` (token indices)."""
    length_S = start_S[1:] - start_S[:-1]
    sequences, longest = len(length_S), int(length_S.max())
    column_L = torch.arange(longest, device=start_S.device)
    flat_SL = start_S[:-1, None] + torch.minimum(column_L[None], length_S[:, None] - 1)
    padded_N = (column_L[None] < length_S[:, None]).flatten().nonzero().flatten()
    return Layout(padded_N, flat_SL.flatten(), sequences, longest)


class _Move(torch.autograd.Function):
    """Rows to the grid (`to_grid`) or back. Each direction's gradient is the other's move, so no scatter-add is needed.

    That holds because padding gets no gradient: a padded key comes after every real query of its sequence, and a padded
    query's output is dropped.
    """

    @staticmethod
    def forward(ctx: Any, row_KE: torch.Tensor, grid: Layout, to_grid: bool) -> torch.Tensor:
        ctx.grid, ctx.to_grid = grid, to_grid
        return row_KE.index_select(0, grid.flat_SL if to_grid else grid.padded_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        grid: Layout = ctx.grid
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

    def to_grid(heads: torch.Tensor) -> torch.Tensor:
        _, count, _, width = heads.shape
        row = heads[0].transpose(0, 1).reshape(-1, count * width)
        return _Move.apply(row, packed, True).view(packed.sequences, packed.longest, count, width).transpose(1, 2)

    query_grid, key_grid, value_grid = to_grid(query), to_grid(key), to_grid(value)
    share = query.shape[1] // key.shape[1]
    # The CPU's fused kernel reads shared heads as they are; on CUDA the float32 one does not, and the fallback needs S H L L.
    grouped = share > 1 and query.device.type == "cpu"
    if share > 1 and not grouped:
        key_grid, value_grid = key_grid.repeat_interleave(share, 1), value_grid.repeat_interleave(share, 1)
    mixed = F.scaled_dot_product_attention(
        query_grid, key_grid, value_grid, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    row = mixed.transpose(1, 2).reshape(packed.sequences * packed.longest, -1)
    return _Move.apply(row, packed, False).view(1, -1, query.shape[1], query.shape[3]), None


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
    """Last hidden states of packed sequences, after the final norm: what the language-model head reads.

    Raises ModelError when the model does not use packed attention (its result would be silently wrong).
    """
    if model.config._attn_implementation != PACKED:
        raise ModelError(
            f"the model's attention is '{model.config._attn_implementation}', which cannot keep packed sequences apart; "
            "load it with load_policy, or call use_packed_attention(model) first"
        )
    # A mask of four dimensions is handed through as it is: so none of N x N is built, and the packed attention reads none.
    no_mask = torch.zeros(1, 1, 1, 1, device=token_N.device)
    output = model.base_model(
        input_ids=token_N[None],
        position_ids=position_N[None],
        attention_mask=no_mask,
        use_cache=False,
        packed=layout(start_S),
    )
    return output.last_hidden_state[0]
