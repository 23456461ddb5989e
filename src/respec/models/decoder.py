"""What decodes: a snapshot of the policy's weights that maps flat tokens to hidden states and logits.

There is one layout for prefill, decoding and verification: M tokens end to end, each with its slot in the KV cache and its position.
A token sees the keys 0..position of its slot, so several tokens of a slot in one pass (a draft, a piece of a prompt) see each other causally.
Where a draft branches, several tokens share a position; `Branches` says whose keys each of them sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from respec.errors import ModelError, StaleError


@dataclass(frozen=True)
class DecodeShape:
    """The sizes that a KV cache and a decoder agree on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config, dtype: torch.dtype, device: torch.device) -> DecodeShape:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.hidden_size, config.vocab_size, dtype, device,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Branches:
    """Where the keys of branching drafts lie. Row m writes its own at index `write_M[m]` of its slot, and finds key
    fork_M[m] + d of its sequence at index `path_MD[m, d]`; keys before fork_M[m] lie at their own index.

    So attention reads every row's keys in the order in which a sequence that never branched would hold them: to the bit.
    """

    write_M: Int64[np.ndarray, "M"]
    fork_M: Int64[np.ndarray, "M"]
    path_MD: Int64[np.ndarray, "M D"]


@dataclass(frozen=True)
class Pass:
    """What one forward pass gives: the final normed hidden states, and the residual stream before each tapped layer, side by side."""

    hidden: Float[Tensor, "M hidden"]
    taps: Float32[Tensor, "M taps*hidden"] | None


class KVStore(Protocol):
    """The tensors of a KV cache; `rollout.kv_cache` owns them. Keys lie in tiles of sixteen: see native/layers.c."""

    keys: list[Float[Tensor, "slots kv_heads tiles dim 16"]]
    values: list[Float[Tensor, "slots kv_heads capacity dim"]]


class Decoder(Protocol):
    """A snapshot of one policy version, ready to decode."""

    shape: DecodeShape
    version: int

    def hidden(
        self,
        token_M: Int64[np.ndarray, "M"],
        slot_M: Int64[np.ndarray, "M"],
        position_M: Int64[np.ndarray, "M"],
        cache: KVStore,
        branches: Branches | None = None,
        taps: Sequence[int] = (),
    ) -> Pass:
        """Writes the tokens' keys and values into the cache. `taps` are indices of layers, in ascending order."""
        ...

    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R V"]:
        """The language-model head."""
        ...


@dataclass
class Spent:
    """What is left of a snapshot whose weights have been let go, until the next one comes."""

    shape: DecodeShape
    version: int

    def hidden(self, *_: Any, **__: Any) -> Pass:
        """Raises StaleError."""
        raise self._stale()

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises StaleError."""
        raise self._stale()

    def _stale(self) -> StaleError:
        return StaleError(
            f"the engine let its weights of version {self.version} go when it was told that newer ones would come; it needs a swap before it decodes again"
        )


def decode_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolves a configured dtype; `auto` is bfloat16 where the hardware multiplies it, else float32. Around `int8` products it is the same.

    Raises ModelError for a name that is not a dtype.
    """
    if name in ("auto", "int8"):
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"model.dtype '{name}' is not a dtype; use auto, bfloat16, float32, float64 or int8")
    return dtype
