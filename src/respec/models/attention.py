"""Attention for decoding, plugged into transformers' modelling code through its attention-function registry.

`respec_decode` writes the new keys and values into our KV cache and attends to the cache: by the native kernel where it fits,
else in PyTorch under two rules that make a row's bits independent of its batch (measured: the CPU kernel's tiling follows both
numbers): query rows come in blocks of exactly 32 per key/value head, and the key length is a multiple of 512, masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from respec.models import kernels
from respec.models.decoder import Branches, DecodeShape, KVStore

QUERY_ROWS = 32
KEY_MULTIPLE = 512
TILE = 16


@dataclass(frozen=True)
class Layout:
    """Where the M tokens of one pass lie, made once for all layers.

    A token's key goes to index `write_M` of its slot. `fork_M` and `path_MD` are those of `decoder.Branches`, for the native kernel.
    For the PyTorch path the tokens of a slot are cut into B blocks of at most `QUERY_ROWS // group`, of one each where drafts
    branch: `block_M` and `row_M` say where a token went, `slot_B` whose keys a block reads, `mask` what its query rows see, `index_BK`
    the order of its keys where that is not the cache's own.
    """

    slot_M: Int64[Tensor, "M"]
    position_M: Int64[Tensor, "M"]
    write_M: Int64[Tensor, "M"]
    native: bool
    fork_M: Int64[Tensor, "M"] | None = None
    path_MD: Int64[Tensor, "M D"] | None = None
    block_M: Int64[Tensor, "M"] | None = None
    row_M: Int64[Tensor, "M"] | None = None
    slot_B: Int64[Tensor, "B"] | None = None
    mask: Bool[Tensor, "B 1 rows keys"] | None = None
    index_BK: Int64[Tensor, "B keys"] | None = None


def lay_out(
    slot_M: Int64[np.ndarray, "M"],
    position_M: Int64[np.ndarray, "M"],
    shape: DecodeShape,
    branches: Branches | None = None,
) -> Layout:
    """Plans one pass. Tokens of a slot must be neighbours."""

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(shape.device)

    slot, position = on_device(slot_M), on_device(position_M)
    write = position if branches is None else on_device(branches.write_M)
    if kernels.supports(shape.dtype, shape.device, shape.head_dim, shape.group):
        fork, path = (None, None) if branches is None else (on_device(branches.fork_M), on_device(branches.path_MD))
        return Layout(slot, position, write, True, fork, path)
    per_block = max(1, QUERY_ROWS // shape.group) if branches is None else 1
    starts = np.flatnonzero(np.r_[True, slot_M[1:] != slot_M[:-1]])
    index_in_run = np.arange(len(slot_M)) - np.repeat(starts, np.diff(np.r_[starts, len(slot_M)]))
    new_block = index_in_run % per_block == 0
    block, row = np.cumsum(new_block) - 1, index_in_run % per_block
    highest = position_M.max() if branches is None else max(position_M.max(), branches.write_M.max())
    keys = -(-(int(highest) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
    sees = np.zeros((int(block[-1]) + 1, per_block), np.int64)
    sees[block, row] = position_M
    rows = np.repeat(sees, shape.group, axis=1)
    rows = np.pad(rows, ((0, 0), (0, max(0, QUERY_ROWS - rows.shape[1]))))
    mask = torch.arange(keys, device=shape.device) <= on_device(rows)[:, None, :, None]
    block_t, row_t, slot_b = map(on_device, (block, row, slot_M[new_block]))
    order = None if branches is None else on_device(_key_order(branches, position_M, keys))
    return Layout(slot, position, write, False, block_M=block_t, row_M=row_t, slot_B=slot_b, mask=mask, index_BK=order)


def _key_order(branches: Branches, position_M: Int64[np.ndarray, "M"], keys: int) -> Int64[np.ndarray, "M keys"]:
    """The cache's indices in the order in which each row sees them; what lies past its position is masked."""
    order = np.tile(np.arange(keys), (len(position_M), 1))
    for row, (fork, position) in enumerate(zip(branches.fork_M, position_M, strict=True)):
        order[row, fork : position + 1] = branches.path_MD[row, : position + 1 - fork]
    return order


def write(
    keys: Float[Tensor, "slots kv_heads tiles dim 16"],
    values: Float[Tensor, "slots kv_heads capacity dim"],
    key: Float[Tensor, "M kv_heads dim"],
    value: Float[Tensor, "M kv_heads dim"],
    layout: Layout,
) -> None:
    """Puts each token's key and value at (slot, write)."""
    write = layout.write_M
    keys[layout.slot_M, :, write // TILE, :, write % TILE] = key
    values[layout.slot_M, :, write] = value


def attend(
    q: Float[Tensor, "M heads dim"],
    keys: Float[Tensor, "slots kv_heads tiles dim 16"],
    values: Float[Tensor, "slots kv_heads capacity dim"],
    layout: Layout,
    scale: float,
) -> Float[Tensor, "M heads dim"]:
    """Each token over keys 0..position of its slot."""
    count, heads, dim = q.shape
    if layout.native:
        out = kernels.attention(
            q.float().contiguous(), keys, values, layout.slot_M, layout.position_M, scale, count, layout.fork_M, layout.path_MD
        )  # fmt: skip
        return out.view(count, heads, dim)
    assert (
        layout.mask is not None
        and layout.slot_B is not None
        and layout.block_M is not None
        and layout.row_M is not None
    )
    blocks, _, rows, length = layout.mask.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    tiles = min(-(-length // TILE), keys.shape[2])
    k = keys[layout.slot_B, :, :tiles].permute(0, 1, 2, 4, 3).reshape(blocks, kv_heads, tiles * TILE, dim)
    v = values[layout.slot_B, :, : tiles * TILE]
    k, v = (F.pad(x, (0, 0, 0, length - x.shape[2])) for x in (k, v))
    if layout.index_BK is not None:
        index = layout.index_BK[:, None, :, None].expand_as(k)
        k, v = k.gather(2, index), v.gather(2, index)
    folded = q.new_zeros(blocks, kv_heads, rows // group + 1, group, dim)
    folded[layout.block_M, :, layout.row_M] = q.view(count, kv_heads, group, dim)
    folded = folded.view(blocks, kv_heads, -1, dim)[:, :, :rows]
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=layout.mask, scale=scale)
    out = F.pad(out, (0, 0, 0, (rows // group + 1) * group - rows)).view(blocks, kv_heads, -1, group, dim)
    return out[layout.block_M, :, layout.row_M].reshape(count, heads, dim)


def respec_decode(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads M dim"],
    key: Float[Tensor, "1 kv_heads M dim"],
    value: Float[Tensor, "1 kv_heads M dim"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: KVStore,
    layout: Layout,
    **_: object,
) -> tuple[Float[Tensor, "1 M heads dim"], None]:
    """The function transformers calls in each layer; `kv` and `layout` reach it through the model's keyword arguments."""
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    keys, values = kv.keys[layer], kv.values[layer]
    write(keys, values, key[0].transpose(0, 1), value[0].transpose(0, 1), layout)
    return attend(query[0].transpose(0, 1), keys, values, layout, scaling)[None], None


AttentionInterface.register("respec_decode", respec_decode)
