"""Which library multiplies float32 matrices while a model is trained.

PyTorch asks MKL, whose kernels for AMD processors stop at AVX2: half of what one with AVX-512 can do. oneDNN, asked when products in bfloat16
are allowed, takes them on processors with matrix units only, and else multiplies in float32, with AVX-512.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
# Of a product's norm. Rounding to float32 gives 3e-7, to bfloat16 2e-3.
FLOAT32_ERROR = 1e-5


@contextmanager
def fast_float32() -> Iterator[None]:
    """Float32 products within are oneDNN's where those are float32 too and faster. Also a decorator."""
    if not onednn_serves():
        yield
        return
    with _asking_onednn():
        yield


@functools.cache
def onednn_serves() -> bool:
    """Whether the processor is AMD's, has AVX-512, and oneDNN's products on it are of float32: tried once, on one product."""
    try:
        about = CPUINFO.read_text()
    except OSError:
        return False
    if "AuthenticAMD" not in about or "avx512f" not in about or "amx" in about:
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((256, 576), (576, 512)))
    with _asking_onednn():
        product = left @ right
    exact = left.double() @ right.double()
    return float((product - exact).norm() / exact.norm()) < FLOAT32_ERROR


@contextmanager
def _asking_onednn() -> Iterator[None]:
    setting: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
