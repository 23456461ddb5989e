"""Float32 products by another library are float32 products, and nothing of the choice is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from respec.models import products
from respec.models.products import FLOAT32_ERROR, fast_float32

MATMUL: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


def error(rows: int) -> float:
    generator = torch.Generator().manual_seed(rows)
    left, right = torch.randn(rows, 192, generator=generator), torch.randn(192, 96, generator=generator)
    exact = left.double() @ right.double()
    return float((left @ right - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_products_within_are_of_float32(rows: int) -> None:
    with fast_float32():
        assert error(rows) < FLOAT32_ERROR


@pytest.mark.parametrize("serves", [True, False])
def test_the_setting_is_as_before_also_after_an_error(monkeypatch, serves: bool) -> None:
    monkeypatch.setattr(products, "onednn_serves", lambda: serves)
    before = MATMUL.fp32_precision
    with pytest.raises(ZeroDivisionError), fast_float32():
        assert (MATMUL.fp32_precision == "bf16") == serves
        raise ZeroDivisionError
    assert MATMUL.fp32_precision == before


@pytest.mark.parametrize(
    "about", ["vendor_id: GenuineIntel\nflags: avx512f", "AuthenticAMD avx2", "AuthenticAMD avx512f amx_bf16"]
)
def test_other_processors_keep_their_library(monkeypatch, tmp_path, about: str) -> None:
    (tmp_path / "cpuinfo").write_text(about)
    monkeypatch.setattr(products, "CPUINFO", tmp_path / "cpuinfo")
    products.onednn_serves.cache_clear()
    try:
        assert not products.onednn_serves()
    finally:
        products.onednn_serves.cache_clear()


def test_a_library_that_rounds_to_bfloat16_is_not_asked(monkeypatch, tmp_path) -> None:
    (tmp_path / "cpuinfo").write_text("AuthenticAMD avx512f")
    monkeypatch.setattr(products, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(products, "FLOAT32_ERROR", 0.0)
    products.onednn_serves.cache_clear()
    try:
        assert not products.onednn_serves()
    finally:
        products.onednn_serves.cache_clear()
