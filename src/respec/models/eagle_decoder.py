"""A snapshot of an EAGLE-3 head that drafts: fused, prepacked weights, one layer of KV cache.

On a CPU with the native kernels a step is five products and five kernels; elsewhere the same in PyTorch. A draft is verified, so nothing here
needs to be blind to the batch: it is so on the native path all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from respec.models import kernels
from respec.models.attention import attend, lay_out, write
from respec.models.decoder import DecodeShape, KVStore
from respec.models.eagle import EagleHead
from respec.models.eagle_check import EMBEDDING, HeadFacts, facts_of
from respec.models.linear import PackedLinear, padded_rows


class EagleDecoder:
    """Reads a head once; the head may go on learning. `shape` is that of its KV cache, of a single layer; `facts` are what the next head is
    held against. A head whose frozen embedding `like` has read already shares that one's copy.

    With `keeps`, or where `like` does, `by_name` has the weights that learn as a checkpoint has them, for an engine outside of this process.
    """

    def __init__(
        self,
        head: EagleHead,
        dtype: torch.dtype,
        like: EagleDecoder | None = None,
        facts: HeadFacts | None = None,
        keeps: bool = False,
    ) -> None:
        config, layer, attention = head.shape.layer, head.layer, head.layer.self_attn
        device = head.lm_head.weight.device
        self.shape = DecodeShape.of(config, dtype, device)
        self.taps, self.hidden, self.facts = head.shape.taps, int(config.hidden_size), facts or facts_of(head)
        self.draft_token: Int64[np.ndarray, "draft"] = head.draft_token.cpu().numpy()
        self._native = kernels.supports(dtype, device, self.shape.head_dim, self.shape.group)
        self._residual = torch.promote_types(dtype, torch.float32)
        self._eps, self._scale = float(config.rms_norm_eps), self.shape.head_dim**-0.5
        self._norm_before_residual = head.shape.norm_before_residual

        def fused(*linears: torch.nn.Linear) -> PackedLinear:
            return PackedLinear(torch.cat([linear.weight.detach().to(dtype, copy=True) for linear in linears]))

        def norm(module) -> Float[Tensor, "hidden"]:
            return module.weight.detach().to(self._residual, copy=True)

        embedding = head.embed_tokens.weight
        # the tensor that was read, and how often it had been written to
        self._read, self._writes = weakref.ref(embedding), embedding._version
        shares = like is not None and like._holds(embedding, dtype)
        self._embedding = like._embedding if like is not None and shares else embedding.detach().to(dtype, copy=True)
        self._fc = fused(head.fc)
        self._qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = fused(attention.o_proj)
        self._gate_up = fused(layer.mlp.gate_proj, layer.mlp.up_proj)
        self._down = fused(layer.mlp.down_proj)
        self._head = fused(head.lm_head)
        self._embedding_norm, self._hidden_norm = norm(layer.input_layernorm), norm(layer.hidden_norm)
        self._post_norm, self._norm = norm(layer.post_attention_layernorm), norm(head.norm)
        self.by_name: Mapping[str, Tensor] | None = None
        if keeps or (like is not None and like.by_name is not None):
            learned = {name: weight for name, weight in head.named_parameters() if name != EMBEDDING}
            self.by_name = {name: weight.detach().to("cpu", dtype, copy=True) for name, weight in learned.items()}
        self._rotary = head.rotary
        self._cos, self._sin = self._rotation(1024)

    @torch.inference_mode()
    def fuse(self, taps: Float[Tensor, "M taps*hidden"]) -> Float[Tensor, "M hidden"]:
        """The features that stand for the target's hidden states."""
        return self._fc(taps.to(self.shape.dtype)).to(self._residual)

    @torch.inference_mode()
    def step(
        self,
        feature: Float[Tensor, "M hidden"],
        token_M: Int64[np.ndarray, "M"],
        slot_M: Int64[np.ndarray, "M"],
        position_M: Int64[np.ndarray, "M"],
        cache: KVStore,
        wanted: Int64[np.ndarray, "B"] | None = None,
    ) -> tuple[Float[Tensor, "B hidden"], Float[Tensor, "B draft"]]:
        """Writes keys and values of pairs (feature at a position, token after it); gives the next feature and the logits over the draft
        vocabulary for the rows `wanted` (None: all). Rows of a slot are neighbours, in order.
        """
        highest = int(position_M.max())
        if highest >= len(self._cos):
            self._cos, self._sin = self._rotation(2 * (highest + 1))
        count, chosen = len(token_M), len(token_M) if wanted is None else len(wanted)
        # rows of padding go through products and norms only, and spare each product a padding of its own
        token = torch.from_numpy(np.pad(token_M, (0, padded_rows(count) - count))).to(self.shape.device)
        feature = _padded(feature)
        embedded = self._embedding[token].to(self._residual)
        normed = self._add_norm(feature, None, self._hidden_norm)
        qkv = self._qkv(torch.cat([self._add_norm(embedded, None, self._embedding_norm), normed], dim=1))
        mixed = _padded(self._attend(qkv, slot_M, position_M, cache, wanted))
        residual = normed.to(self._residual) if self._norm_before_residual else feature.clone()
        if wanted is not None:
            residual = _padded(residual[torch.from_numpy(wanted).to(residual.device)])
        gate_up = self._gate_up(self._add_norm(residual, self._output(mixed), self._post_norm))
        out = self._add_norm(residual, self._down(self._gated(gate_up)), self._norm)
        return residual[:chosen], self._head(out)[:chosen]

    def rotates_right(self) -> bool:
        """Whether the cosines and sines at hand are those of their positions."""
        kept = zip((self._cos, self._sin), self._rotation(len(self._cos)), strict=True)
        return all(torch.equal(mine, right) for mine, right in kept)

    def _holds(self, embedding: Float[Tensor, "V hidden"], dtype: torch.dtype) -> bool:
        """Whether this tensor is what the copy at hand was made of, and has not been written to since."""
        same = self._read() is embedding and self._writes == embedding._version
        return same and (self._embedding.dtype, self._embedding.device) == (dtype, embedding.device)

    def _rotation(self, positions: int) -> tuple[Float[Tensor, "positions dim"], Float[Tensor, "positions dim"]]:
        like = torch.zeros((), dtype=self._residual, device=self.shape.device)
        with torch.no_grad():
            cos, sin = self._rotary(like, torch.arange(positions, device=self.shape.device)[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def _add_norm(
        self, residual: Float[Tensor, "M hidden"], x: Float[Tensor, "M hidden"] | None, weight: Float[Tensor, "hidden"]
    ) -> Float[Tensor, "M hidden"]:
        """residual += x in place, then its RMS norm times weight, in the decoding dtype."""
        if self._native:
            return kernels.add_rmsnorm(residual, x, weight, self._eps, self.shape.dtype)
        if x is not None:
            residual += x
        scale = torch.rsqrt(residual.pow(2).mean(dim=1, keepdim=True) + self._eps)
        return (residual * scale * weight).to(self.shape.dtype)

    def _gated(self, gate_up: Float[Tensor, "M two_width"]) -> Float[Tensor, "M width"]:
        if self._native:
            return kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up

    def _attend(
        self,
        qkv: Float[Tensor, "M fused"],
        slot_M: Int64[np.ndarray, "M"],
        position_M: Int64[np.ndarray, "M"],
        cache: KVStore,
        wanted: Int64[np.ndarray, "B"] | None,
    ) -> Float[Tensor, "B heads*dim"]:
        """Writes all rows' keys and values; attention for the wanted ones."""
        keys, values = cache.keys[0], cache.values[0]
        rows = slice(None) if wanted is None else wanted
        if self._native:
            slot, position = torch.from_numpy(slot_M), torch.from_numpy(position_M)
            q = kernels.rope_write(
                qkv, self._cos, self._sin, position, position, slot, None, None, self._eps, keys, values, self.shape.heads
            )  # fmt: skip
            if wanted is not None:
                q, slot, position = (x[rows].contiguous() for x in (q, slot, position))
            return kernels.attention(q, keys, values, slot, position, self._scale, padded_rows(len(q)))
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        position = torch.from_numpy(position_M).to(qkv.device)
        cos, sin = self._cos[position][:, None], self._sin[position][:, None]

        def rotated(x: Float[Tensor, "M n dim"]) -> Float[Tensor, "M n dim"]:
            first, second = x.chunk(2, dim=-1)
            return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(self.shape.dtype)

        q, k, v = qkv[: len(slot_M)].view(len(slot_M), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        write(keys, values, rotated(k), v, lay_out(slot_M, position_M, self.shape))
        q = rotated(q)[rows]
        return attend(q, keys, values, lay_out(slot_M[rows], position_M[rows], self.shape), self._scale).flatten(1)


def _padded(rows: Float[Tensor, "M width"]) -> Float[Tensor, "padded width"]:
    extra = padded_rows(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, extra)) if extra else rows
