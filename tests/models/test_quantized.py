"""Linear layers at int8: exact integer sums, a row's bits its own, and near the layer they stand for."""

from __future__ import annotations

import pytest
import torch

from respec.models import quantized as module
from respec.models.linear import PackedLinear
from respec.models.quantized import Int8Linear, native, quantized, rounded_weight

needs_native = pytest.mark.skipif(not native()[0], reason=f"no native int8 product: {native()[1]}")


def make(out: int, into: int, dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(out + into)
    return torch.randn(out, into).to(dtype), torch.randn(out).to(dtype) if bias else None


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 48), (33, 50), (1, 4), (96, 1536)], ids=str)
def test_it_is_the_integer_product_of_what_was_rounded(dtype, shape):
    weight, bias = make(*shape, dtype, bias=True)
    layer = Int8Linear(weight, bias)
    x = torch.randn(11, shape[1]).to(dtype)
    x[3] = 0
    values, scale = rounded_weight(weight)
    top = x.float().abs().amax(1, keepdim=True)
    rounded = torch.where(top > 0, x.double() * (127 / top).double(), 0).round()
    exact = (rounded @ values.double().T) * scale.double() * (top / 127).double() + bias.double()
    assert layer(x).dtype == dtype
    # a unit in bfloat16's last place, where float32 and float64 fall on either side of the middle
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert torch.equal(layer(x)[3], bias)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype):
    layer = Int8Linear(*make(80, 64, dtype, bias=False))
    x = torch.randn(33, 64).to(dtype)
    whole = layer(x)
    assert all(torch.equal(layer(x[first:last]), whole[first:last]) for first in (0, 5) for last in range(6, 34))
    assert torch.equal(layer(x.view(3, 11, 64)), whole.view(3, 11, 80))


@pytest.mark.parametrize("path", ["native", "fallback"])
def test_it_stays_near_the_layer_that_it_stands_for(monkeypatch, path):
    if path == "fallback":
        monkeypatch.setattr(module, "native", lambda: (False, "switched off"))
    elif not native()[0]:
        pytest.skip(native()[1])
    weight, bias = make(128, 192, torch.bfloat16, bias=True)
    layer = quantized(weight, bias)
    assert isinstance(layer, Int8Linear if path == "native" else PackedLinear)
    x = torch.randn(16, 192).bfloat16()
    exact = x.float() @ weight.float().T + bias.float()
    assert (layer(x).float() - exact).norm() / exact.norm() < 0.02
