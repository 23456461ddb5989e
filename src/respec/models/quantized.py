"""Linear layers with 8-bit weights, for decoders that draft: what they lose in precision costs acceptance, never exactness.

Weights are rounded to int8 with one scale an output (the largest magnitude at 127), activations, row by row, the same way when they come.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from respec.models import kernels
from respec.models.linear import PackedLinear

TILE = 16
PAIR = 2 * TILE


def rounded_weight(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float32[Tensor, "out"]]:
    """int8 weights and the scale of each output, their product nearest to the weight."""
    exact = weight.detach().float()
    scale = exact.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny * 128) / 127
    return (exact / scale[:, None]).round().to(torch.int8), scale


def quantized(weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None) -> nn.Module:
    """The linear layer with its weights at int8: by the native product where it can be had, else by the ordinary one, no faster."""
    if weight.device.type == "cpu" and weight.dtype in kernels.DTYPES and kernels.available()[0]:
        return Int8Linear(weight, bias)
    values, scale = rounded_weight(weight)
    return PackedLinear((values * scale[:, None]).to(weight.dtype), bias)


class Int8Linear(nn.Module):
    """y = x W^T + b, W and x at int8, sums exact in int32; inference only. A row's bits depend on the row alone."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        values, scale = rounded_weight(weight)
        more_out, self._more_in = -self.out_features % PAIR, -self.in_features % 4
        values = F.pad(values, (0, self._more_in, 0, more_out))
        out, into = values.shape
        # plain attributes: these are not parameters
        self.weight = values.view(out // TILE, TILE, into // 4, 4).transpose(1, 2).contiguous()
        self.scale = F.pad(scale, (0, more_out))
        self.sum = values.sum(dim=1, dtype=torch.int32)
        self.bias = F.pad(bias.detach().float(), (0, more_out)) if bias is not None else None

    def forward(self, x: Float[Tensor, "*M in"]) -> Float[Tensor, "*M out"]:
        rows = F.pad(x.reshape(-1, self.in_features), (0, self._more_in)).contiguous()
        count, into = rows.shape
        y = torch.empty(count, len(self.scale), dtype=x.dtype)
        code = _library().int8_linear(
            rows.data_ptr(), self.weight.data_ptr(), self.scale.data_ptr(), self.sum.data_ptr(),
            self.bias.data_ptr() if self.bias is not None else None, y.data_ptr(), count, into, len(self.scale),
            torch.get_num_threads(), kernels.DTYPES[x.dtype],
        )  # fmt: skip
        if code:
            raise MemoryError(f"the int8 product could not get memory for {count} rows of {into}")
        return y[:, : self.out_features].reshape(*x.shape[:-1], self.out_features)


@functools.cache
def _library() -> ctypes.CDLL:
    library = kernels.compiled()
    i64, i32, ptr = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    library.int8_linear.argtypes = [ptr] * 6 + [i64] * 3 + [i32] * 2
    return library
