"""What a certificate asks of the engine it is about. Another engine is certified by being put behind `CertifiedEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from respec.models.decoder import KVStore
from respec.types import Ask, Plan, Rollout, Sampling

# By how much a log-probability may move, in nats, for no other reason than that a product was rounded elsewhere.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class CertifiedEngine(Protocol):
    """Draws each ask `group` times under a plan; an engine that plans for itself may take the plan as a hint."""

    def __call__(self, asks: Sequence[Ask], sampling: Sampling, plan: Plan) -> Sequence[Rollout]: ...


class Margin(Protocol):
    """By how many nats `winner` beats `other` in the race for one token, under these log-probabilities; None where they did not race
    each other one by one. Negative: `other` is first."""

    def __call__(
        self, rollout: Rollout, position: int, logp_V: Float64[np.ndarray, "V"], winner: int, other: int
    ) -> float | None: ...


class Cache(KVStore, Protocol):
    """A KV cache that can be looked into."""

    def entries(
        self, slot: int, length: int
    ) -> tuple[list[Float[Tensor, "kv_heads T dim"]], list[Float[Tensor, "kv_heads T dim"]]]: ...

    def move(
        self, slot_N: Int64[np.ndarray, "N"], source_N: Int64[np.ndarray, "N"], target_N: Int64[np.ndarray, "N"]
    ) -> None: ...


class MakeCache(Protocol):
    """A new cache of `slots` sequences of up to `capacity` tokens."""

    def __call__(self, slots: int, capacity: int) -> Cache: ...
