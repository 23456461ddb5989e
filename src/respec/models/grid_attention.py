"""Causal attention over packed sequences with its gradient written out, for training on a CPU.

Short sequences attend by matrix products and a softmax, a few sequences at a time so that the scores stay in the processor's cache; the query heads that
share a key head lie under each other, so that sums over them are part of the products. Longer ones take PyTorch's flash attention.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from respec.models.grids import Grid, Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Tokens. What lies above the diagonal is computed in vain, half of all; measured against flash attention, SmolLM2's heads, two cores.
SHORT = 512
# Scores at once: 8 MiB of float32.
SCORES = 2**21


def attend(
    query_NE: Float[Tensor, "N H*D"],
    key_NE: Float[Tensor, "N K*D"],
    value_NE: Float[Tensor, "N K*D"],
    layout: Layout,
    width: int,
    scale: float,
) -> tuple[Float[Tensor, "N H*D"], tuple[Float[Tensor, "S H L"], ...]]:
    """What each token mixes of its own sequence, with heads of `width` D, and the scores' log-normalisers by grid."""
    tokens, parts, lse_G = [grid.tokens for grid in layout], [], []
    for grid, *rows in zip(layout, *(flat.split(tokens) for flat in (query_NE, key_NE, value_NE)), strict=True):
        query, key, value = (_to_grid(part, grid, width) for part in rows)
        if grid.longest > SHORT:
            mixed, lse = _flash(query, key, value, 0.0, True, scale=scale)
        else:
            mixed, lse = _short(query, key, value, scale)
        parts.append(_from_grid(mixed, grid))
        lse_G.append(lse)
    return _joined(parts), tuple(lse_G)


def attend_gradient(
    slope_NE: Float[Tensor, "N H*D"],
    query_NE: Float[Tensor, "N H*D"],
    key_NE: Float[Tensor, "N K*D"],
    value_NE: Float[Tensor, "N K*D"],
    mixed_NE: Float[Tensor, "N H*D"],
    lse_G: tuple[Float[Tensor, "S H L"], ...],
    layout: Layout,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients at queries, keys and values. What pads a grid has none: no real query sees a padded key, and a padded query none reads."""
    tokens, parts = [grid.tokens for grid in layout], []
    flats = (flat.split(tokens) for flat in (slope_NE, query_NE, key_NE, value_NE, mixed_NE))
    for grid, lse, slope, *rows in zip(layout, lse_G, *flats, strict=True):
        if len(grid.flat_SL) != grid.tokens:
            slope = slope.new_zeros(len(grid.flat_SL), slope.shape[1]).index_copy_(0, grid.padded_N, slope)
        slope = slope.view(grid.sequences, grid.longest, -1, width).transpose(1, 2)
        query, key, value, mixed = (_to_grid(part, grid, width) for part in rows)
        if grid.longest > SHORT:
            found = _flash_backward(slope, query, key, value, mixed, lse, 0.0, True, scale=scale)
        else:
            found = _short_gradient(slope, query, key, value, mixed, lse, scale)
        parts.append([_from_grid(part, grid) for part in found])
    query_grad, key_grad, value_grad = map(_joined, zip(*parts, strict=True))
    return query_grad, key_grad, value_grad


def _short(
    query: Float[Tensor, "S H L D"], key: Float[Tensor, "S K L D"], value: Float[Tensor, "S K L D"], scale: float
) -> tuple[Float[Tensor, "S H L D"], Float[Tensor, "S H L"]]:
    sequences, heads, longest, width = query.shape
    mixed = query.new_empty(sequences, longest, heads, width).transpose(1, 2)
    lse = query.new_empty(sequences, heads, longest)
    ahead = _ahead(query, heads // key.shape[1])
    for part in _parts(sequences, heads * longest * longest):
        q, k, v = _folded(query[part], key.shape[1]), key[part].flatten(0, 1), value[part].flatten(0, 1)
        score = torch.baddbmm(ahead, q, k.mT, alpha=scale)
        highest = score.amax(dim=-1, keepdim=True)
        total = score.sub_(highest).exp_().sum(dim=-1, keepdim=True)
        mixed[part] = torch.bmm(score, v).div_(total).view(-1, heads, longest, width)
        lse[part] = highest.add_(total.log_()).view(-1, heads, longest)
    return mixed, lse


def _short_gradient(
    slope: Float[Tensor, "S H L D"],
    query: Float[Tensor, "S H L D"],
    key: Float[Tensor, "S K L D"],
    value: Float[Tensor, "S K L D"],
    mixed: Float[Tensor, "S H L D"],
    lse: Float[Tensor, "S H L"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With P the weights and D = sum of slope * mixed: scores' slope P (slope V^T - D) (FlashAttention, arXiv 2205.14135, appendix B.2)."""
    sequences, heads, longest, width = query.shape
    shared = key.shape[1]
    query_grad, key_grad, value_grad = (
        torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for x in (query, key, value)
    )
    ahead, reach = _ahead(query, heads // shared), (slope * mixed).sum(dim=-1)
    for part in _parts(sequences, heads * longest * longest):
        q, s = _folded(query[part], shared), _folded(slope[part], shared)
        k, v = key[part].flatten(0, 1), value[part].flatten(0, 1)
        rows = len(q), q.shape[1], 1
        weight = torch.baddbmm(ahead, q, k.mT, alpha=scale).sub_(lse[part].reshape(rows)).exp_()
        value_grad[part] = torch.bmm(weight.mT, s).view(-1, shared, longest, width)
        pull = torch.bmm(s, v.mT).sub_(reach[part].reshape(rows)).mul_(weight).mul_(scale)
        query_grad[part] = torch.bmm(pull, k).view(-1, heads, longest, width)
        key_grad[part] = torch.bmm(pull.mT, q).view(-1, shared, longest, width)
    return query_grad, key_grad, value_grad


def _ahead(query: Tensor, group: int) -> Float[Tensor, "1 group*L L"]:
    """Minus infinity where a query would see a key that comes after it, else nought."""
    longest = query.shape[2]
    return query.new_full((longest, longest), -torch.inf).triu_(1).repeat(group, 1)[None]


def _folded(heads: Float[Tensor, "S H L D"], shared: int) -> Float[Tensor, "S*K G*L D"]:
    return heads.reshape(len(heads) * shared, -1, heads.shape[3])


def _parts(sequences: int, scores: int) -> list[slice]:
    """Sequences taken at once, each of that many scores."""
    count = max(1, SCORES // scores)
    return [slice(begin, begin + count) for begin in range(0, sequences, count)]


def _to_grid(rows: Tensor, grid: Grid, width: int) -> Float[Tensor, "S heads L D"]:
    if len(grid.flat_SL) != grid.tokens:
        rows = rows.index_select(0, grid.flat_SL)
    return rows.view(grid.sequences, grid.longest, -1, width).transpose(1, 2)


def _from_grid(heads: Float[Tensor, "S heads L D"], grid: Grid) -> Tensor:
    rows = heads.transpose(1, 2).reshape(grid.sequences * grid.longest, -1)
    return rows if len(rows) == grid.tokens else rows.index_select(0, grid.padded_N)


def _joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
