"""Linear layers for decoding: prepacked for oneDNN where the processor has it, and blind to what else is in the batch.

Measured on AVX-512 processors, a prepacked product gives every row the same bits for any number of rows from 4 up (bfloat16 from 1 up);
float32 takes another kernel below that. oneDNN compiles a kernel for every new number of rows (milliseconds each), so rows are padded
to a few sizes. Where prepacking is missing, products run in blocks of a fixed number of rows on a CPU, which holds the same
promise at a higher price.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST_ROWS = 4
BLOCK_ROWS = 32


class MakeLinear(Protocol):
    """Makes a linear layer of fixed weights, as a decoder wants it."""

    def __call__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None, /) -> nn.Module: ...


class PackedLinear(nn.Module):
    """y = x W^T + b for fixed weights; inference only."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = weight.device.type == "cpu" and can_prepack(weight.dtype)
        stored = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BLOCK_ROWS)
            if self.packed
            else weight.contiguous()
        )
        # plain attributes: these are not parameters, and a packed weight cannot be saved or moved
        self.weight = stored
        self.bias = bias

    def forward(self, x: Float[Tensor, "*M in"]) -> Float[Tensor, "*M out"]:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if self.packed:
            size = padded_rows(count)
            padded = F.pad(rows, (0, 0, 0, size - count)) if size > count else rows
            y = torch.ops.mkldnn._linear_pointwise(padded, self.weight, self.bias, "none", [], "")[:count]
        elif x.device.type == "cpu":
            padded = F.pad(rows, (0, 0, 0, -count % BLOCK_ROWS))
            y = torch.cat([F.linear(block, self.weight, self.bias) for block in padded.split(BLOCK_ROWS)])[:count]
        else:
            y = F.linear(rows, self.weight, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


def padded_rows(count: int) -> int:
    """The size that `count` rows are padded to: a multiple of 4, and at most eight sizes to a doubling."""
    step = max(FEWEST_ROWS, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes prepacked weights of this dtype here; tried, not guessed."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        x = torch.ones(FEWEST_ROWS, 16, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(8, 16, dtype=dtype), FEWEST_ROWS)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return bool((y == 16).all())
