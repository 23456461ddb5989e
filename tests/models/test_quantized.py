"""Linear layers at int8: exact integer sums, a row's bits its own, and near the layer they stand for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from respec.models.kernels import available, switch
from respec.models.linear import PackedLinear
from respec.models.quantized import Int8Linear, quantized, rounded_weight

needs_native = pytest.mark.skipif(not available()[0], reason=f"no native int8 product: {available()[1]}")


def make(out: int, into: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(out + into)
    return torch.randn(out, into).to(dtype), torch.randn(out).to(dtype)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out, into", [(64, 48), (33, 50), (1, 4), (96, 1536)])
def test_it_is_the_integer_product_of_what_was_rounded(dtype, out, into):
    weight, bias = make(out, into, dtype)
    layer = Int8Linear(weight, bias)
    # activations that int8 holds exactly, at a step of 1/16
    rounded = torch.randint(-127, 128, (11, into))
    rounded[:, 0], rounded[3] = 127, 0
    values, scale = rounded_weight(weight)
    exact = (rounded @ values.long().T).double() * scale.double() / 16 + bias.double()
    x = (rounded / 16).to(dtype)
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-4)
    assert torch.equal(layer(x)[3], bias)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype):
    layer = Int8Linear(make(80, 64, dtype)[0])
    x = torch.randn(33, 64).to(dtype)
    whole = layer(x)
    assert all(torch.equal(layer(x[first:last]), whole[first:last]) for first in (0, 5) for last in range(6, 34))
    assert torch.equal(layer(x.view(3, 11, 64)), whole.view(3, 11, 80))


@pytest.mark.parametrize("path", ["native", "fallback"])
def test_it_stays_near_the_layer_that_it_stands_for(path):
    if path == "native" and not available()[0]:
        pytest.skip(available()[1])
    weight, bias = make(128, 192, torch.bfloat16)
    with switch.off() if path == "fallback" else nullcontext():
        layer = quantized(weight, bias)
    assert isinstance(layer, Int8Linear if path == "native" else PackedLinear)
    x = torch.randn(16, 192).bfloat16()
    exact = x.float() @ weight.float().T + bias.float()
    assert (layer(x).float() - exact).norm() / exact.norm() < 0.02
