"""Gradients of matrices, added where they are kept as the backward pass finds them.

Autograd has each use of a weight hand over a gradient of the weight's own size, and adds them up afterwards: for a head tied to the embedding that
is the vocabulary's matrix twice more in every micro-batch, each time in memory that has to be taken anew. A product can add to what is there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# Numbers that a matrix begins at a multiple of: 64 bytes of float32.
LANE = 16
PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)

_in_place: ContextVar[bool] = ContextVar("in_place", default=False)


@contextmanager
def added_in_place() -> Iterator[None]:
    """The backward passes of forward passes within add to the weights' `grad` by themselves, where the layers and the head are ours. Also a decorator.

    For whoever wants `grad` and nothing else: autograd is told that there is no gradient, so `torch.autograd.grad` finds none.
    """
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def in_place() -> bool:
    """Whether this forward pass is within `added_in_place`; other threads' are not."""
    return _in_place.get()


def begin(weights: Iterable[Tensor]) -> None:
    """Gives trained matrices on a CPU that have no `grad` one of nought, all in one piece of memory beside the heap, which goes back to the system with
    the last of them: between activations they would leave holes there.

    The pages are taken at once: one that is read before it is written is faulted in twice. Small ones: asked for large ones, a virtual machine took 1.2 s
    instead of 0.2 for half a gigabyte.
    """
    for dtype, alike in _by_dtype(weights).items():
        room = [-(-weight.numel() // LANE) * LANE for weight in alike]
        pages = mmap.mmap(-1, sum(room) * dtype.itemsize, flags=PAGES)
        for weight, part in zip(alike, torch.frombuffer(pages, dtype=dtype).split(room), strict=True):
            weight.grad = part[: weight.numel()].view(weight.shape)


def begun(weight: Tensor) -> Tensor:
    """The weight's `grad`, nought where it had none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def product(slope: Float[Tensor, "N out"], read: Float[Tensor, "N in"], weight: Tensor, here: bool) -> Tensor | None:
    """The gradient of `weight`, which multiplied `read`: returned, or with `here` added in place."""
    if not here:
        return (slope.T @ read).to(weight.dtype)
    if slope.dtype == weight.dtype:
        begun(weight).addmm_(slope.T, read)
    else:
        begun(weight).add_(slope.T @ read)
    return None


def _by_dtype(weights: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        if weight.requires_grad and weight.ndim > 1 and weight.grad is None and weight.device.type == "cpu":
            found.setdefault(weight.dtype, []).append(weight)
    return found


def embedded(token_N: Int[Tensor, "N"], weight_VE: Float[Tensor, "V E"]) -> Float[Tensor, "N E"]:
    """The tokens' rows of an embedding."""
    if not in_place():
        return F.embedding(token_N, weight_VE)
    return _Embedded.apply(token_N, weight_VE)  # pyright: ignore[reportReturnType]


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_N: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(token_N, weight_VE)
        return F.embedding(token_N, weight_VE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        token_N, weight_VE = ctx.saved_tensors
        begun(weight_VE).index_add_(0, token_N, gradients[0])
        return None, None
