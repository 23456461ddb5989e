"""The KV cache: slots of fixed capacity, each holding one sequence's keys and values, stamped with the policy version that made them.

A pass names (slot, position) for every token, so a finished sequence's slot is free for the next one at once and nothing has
to be moved to close ranks. Rolling back a rejected draft is only a matter of length: an entry past a sequence's length is never read,
and is overwritten before the length reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from respec.errors import CacheError, StaleError
from respec.models.attention import TILE
from respec.models.decoder import DecodeShape

NO_VERSION = -1


class KVCache:
    """`slots` sequences of up to `capacity` tokens (rounded up to a whole tile)."""

    def __init__(self, shape: DecodeShape, slots: int, capacity: int) -> None:
        tiles = -(-capacity // TILE)
        self.shape, self.slots, self.capacity = shape, slots, tiles * TILE
        make = {"dtype": shape.dtype, "device": shape.device}
        # zeros, not empty: PyTorch's attention multiplies masked entries by nought, and a NaN would survive that
        self.keys = [
            torch.zeros(slots, shape.kv_heads, tiles, shape.head_dim, TILE, **make) for _ in range(shape.layers)
        ]
        self.values = [
            torch.zeros(slots, shape.kv_heads, self.capacity, shape.head_dim, **make) for _ in range(shape.layers)
        ]
        self.length = np.zeros(slots, np.int64)
        self.version = np.full(slots, NO_VERSION, np.int64)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def can_allocate(self) -> bool:
        return bool(self._free)

    def allocate(self, version: int) -> int:
        """Takes an empty slot for entries made by this policy version. Raises CacheError when none is free."""
        if not self._free:
            raise CacheError(f"all {self.slots} slots of the KV cache are taken; release one first")
        slot = self._free.pop()
        self.length[slot], self.version[slot] = 0, version
        return slot

    def hold(self, index_M: Int64[np.ndarray, "M"]) -> None:
        """Raises CacheError where keys would be written past a slot's end: native kernels would write them into whatever lies there."""
        if len(index_M) and int(index_M.max()) >= self.capacity:
            raise CacheError(
                f"a key for index {int(index_M.max())} of slots that hold {self.capacity}; this is a fault of the engine"
            )

    def release(self, slot: int) -> None:
        """Gives a slot back; its entries can no longer be read."""
        if slot in self._free:
            raise CacheError(f"slot {slot} is already free")
        self.length[slot], self.version[slot] = 0, NO_VERSION
        self._free.append(slot)

    def reset(self, slot: int, version: int) -> None:
        """Empties a slot in use, for entries of another policy version: what follows a weight swap."""
        self.length[slot], self.version[slot] = 0, version

    def fork(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens, as for the samples of one prompt. Raises StaleError across versions."""
        if self.version[source] != self.version[target]:
            raise StaleError(
                f"slot {source} holds keys of policy version {self.version[source]}, slot {target} is for {self.version[target]}"
            )
        if length > self.length[source]:
            raise CacheError(f"slot {source} holds {self.length[source]} tokens, {length} were asked for")
        tiles = -(-length // TILE)
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :tiles] = keys[source, :, :tiles]
            values[target, :, :length] = values[source, :, :length]
        self.length[target] = length

    def move(
        self, slot_N: Int64[np.ndarray, "N"], source_N: Int64[np.ndarray, "N"], target_N: Int64[np.ndarray, "N"]
    ) -> None:
        """Moves single tokens within their slots, as if at once: the accepted path of a branching draft closes ranks."""
        if not len(slot_N):
            return
        slot, source, target = (
            torch.from_numpy(array).to(self.keys[0].device) for array in (slot_N, source_N, target_N)
        )
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[slot, :, target // TILE, :, target % TILE] = keys[slot, :, source // TILE, :, source % TILE]
            values[slot, :, target] = values[slot, :, source]

    def entries(
        self, slot: int, length: int
    ) -> tuple[list[Float[Tensor, "kv_heads T dim"]], list[Float[Tensor, "kv_heads T dim"]]]:
        """Keys and values of a slot's first `length` tokens, per layer, in the usual layout; for tests and inspection."""
        keys = [k[slot].permute(0, 1, 3, 2).reshape(k.shape[1], -1, k.shape[3])[:, :length] for k in self.keys]
        return keys, [v[slot, :, :length] for v in self.values]

    def check_integrity(self, version: int) -> None:
        """Raises CacheError when slots leak or overflow, StaleError when one in use is of another policy version."""
        if len(set(self._free)) != len(self._free):
            raise CacheError(f"a slot is free twice: {sorted(self._free)}")
        taken = sorted(set(range(self.slots)) - set(self._free))
        if (self.length < 0).any() or (self.length > self.capacity).any():
            raise CacheError(f"a slot's length is outside 0..{self.capacity}: {self.length.tolist()}")
        stale = [slot for slot in taken if self.version[slot] != version]
        if stale:
            raise StaleError(
                f"slots {stale} hold keys of policy versions {self.version[stale].tolist()}, the policy is at {version}"
            )


def bytes_of(shape: DecodeShape, capacity: int) -> int:
    """Of one slot for `capacity` tokens."""
    tokens = -(-capacity // TILE) * TILE
    return 2 * tokens * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize


def slots_within(budget: int | None, shapes: Sequence[DecodeShape], wanted: int, capacity: int) -> int:
    """How many sequences of `capacity` tokens may have slots, `wanted` at the utmost, in caches of these shapes together within `budget` bytes.

    Raises CacheError where there is no room for one.
    """
    if budget is None:
        return wanted
    one = sum(bytes_of(shape, capacity) for shape in shapes)
    if one > budget:
        raise CacheError(
            f"rollout.kv_cache_mb is {budget / 2**20:g}, but the keys and values of a single sequence of {capacity} tokens take "
            f"{one / 2**20:.1f} MiB; raise it, or lower rollout.max_new_tokens or the prompts' length (where requests are served, max_length)"
        )
    return min(wanted, budget // one)


def allocated(shape: DecodeShape, slots: int, capacity: int) -> KVCache:
    """A cache of `slots` sequences of `capacity` tokens. Raises CacheError when there is no memory for it."""
    try:
        return KVCache(shape, slots, capacity)
    except RuntimeError as error:
        raise CacheError(
            f"no memory for a KV cache of {slots} sequences of {capacity} tokens: {error}; lower rollout.max_batch or "
            "rollout.max_new_tokens"
        ) from error
