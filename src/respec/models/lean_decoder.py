"""A lean fused decoder for the Llama / Qwen2 / Qwen3 families on a CPU: four products and four kernels a layer.

QKV and gate/up are fused, linear layers prepacked, the rest runs in `native/`, where a row's result depends on nothing but the row; where it can be,
all layers are one native call. The residual stream stays in float32, products in the snapshot's dtype. A test holds its logits to transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from respec.models import kernels
from respec.models.adapted import weight_of
from respec.models.decoder import Branches, DecodeShape, KVStore, Pass
from respec.models.linear import MakeLinear, PackedLinear, padded_rows
from respec.models.stack import Layer, Places, Stack
from respec.models.stack import fits as stacks


class LeanDecoder:
    """A `Decoder` of fused weights; `linear` makes its products, prepacked ones unless told otherwise."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, version: int, linear: MakeLinear = PackedLinear
    ) -> None:
        config, body = model.config, model.model
        self.version = version
        self.shape = DecodeShape.of(config, dtype, torch.device("cpu"))
        self._eps = float(config.rms_norm_eps)
        self._scale = self.shape.head_dim**-0.5
        self._embedding = _rounded(body.embed_tokens.weight, dtype)
        self._layers = [_layer(layer, dtype, linear) for layer in body.layers]
        self._norm = _norm(body.norm)
        self._head = _fuse([model.lm_head], dtype, linear)
        self._stack = Stack(self._layers, self._norm, self.shape, self._eps) if stacks(self._layers) else None
        self._rotary = body.rotary_emb
        self._cos, self._sin = self._rotation(1024)

    def _rotation(self, positions: int) -> tuple[Float[Tensor, "positions dim"], Float[Tensor, "positions dim"]]:
        """The rotary tables, by the model's own rotary module, in float32."""
        with torch.no_grad():
            cos, sin = self._rotary(torch.zeros(1, 1), torch.arange(positions)[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    @torch.inference_mode()
    def hidden(
        self,
        token_M: Int64[np.ndarray, "M"],
        slot_M: Int64[np.ndarray, "M"],
        position_M: Int64[np.ndarray, "M"],
        cache: KVStore,
        branches: Branches | None = None,
        taps: Sequence[int] = (),
    ) -> Pass:
        highest = int(position_M.max())
        if highest >= len(self._cos):
            self._cos, self._sin = self._rotation(2 * (highest + 1))
        slot, position = torch.from_numpy(slot_M), torch.from_numpy(position_M)
        write, fork, path = position, None, None
        if branches is not None:
            write, fork, path = map(torch.from_numpy, (branches.write_M, branches.fork_M, branches.path_MD))
        count, padded = len(token_M), padded_rows(len(token_M))
        # rows of padding go through products and norms only: they have no place in the cache
        residual = self._embedding[torch.from_numpy(np.pad(token_M, (0, padded - count)))].float()
        places = Places(position, write, slot, fork, path)
        through = self._stack.run if self._stack is not None else self._interpreted
        hidden, tapped = through(residual, places, (self._cos, self._sin), cache, taps)
        return Pass(hidden[:count], tapped.transpose(0, 1).flatten(1) if taps else None)

    def _interpreted(
        self,
        residual: Float[Tensor, "padded hidden"],
        places: Places,
        tables: tuple[Float[Tensor, "positions dim"], Float[Tensor, "positions dim"]],
        cache: KVStore,
        taps: Sequence[int],
    ) -> tuple[Float[Tensor, "padded hidden"], Float[Tensor, "taps M hidden"]]:
        """What `Stack.run` does, call by call, with products of any kind."""
        position, write, slot, fork, path = places
        dtype, x, padded = self.shape.dtype, None, len(residual)
        tapped = torch.empty(len(taps), len(position), residual.shape[1])
        for index, (layer, keys, values) in enumerate(zip(self._layers, cache.keys, cache.values, strict=True)):
            normed = kernels.add_rmsnorm(residual, x, layer.input_norm, self._eps, dtype)
            if index in taps:
                tapped[taps.index(index)] = residual[: len(position)]
            q = kernels.rope_write(
                layer.qkv(normed),
                *tables,
                position,
                write,
                slot,
                layer.q_norm,
                layer.k_norm,
                self._eps,
                keys,
                values,
                self.shape.heads,
            )
            x = layer.output(kernels.attention(q, keys, values, slot, position, self._scale, padded, fork, path))
            normed = kernels.add_rmsnorm(residual, x, layer.post_norm, self._eps, dtype)
            x = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        return kernels.add_rmsnorm(residual, x, self._norm, self._eps, dtype), tapped

    @torch.inference_mode()
    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R V"]:
        return self._head(hidden)


def fits(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this model, dtype and machine can take the lean decoder."""
    shape = DecodeShape.of(model.config, dtype, device)
    silu = getattr(model.config, "hidden_act", "silu") in ("silu", "swish")
    return silu and kernels.supports(dtype, device, shape.head_dim, shape.group)


def _layer(layer, dtype: torch.dtype, linear: MakeLinear) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj], dtype, linear),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=_fuse([attention.o_proj], dtype, linear),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=_fuse([mlp.gate_proj, mlp.up_proj], dtype, linear),
        down=_fuse([mlp.down_proj], dtype, linear),
    )


def _fuse(linears: list, dtype: torch.dtype, make: MakeLinear) -> nn.Module:
    weight = torch.cat([_rounded(weight_of(linear), dtype) for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return make(weight)
    whole = [
        _rounded(bias, dtype) if bias is not None else torch.zeros(linear.out_features, dtype=dtype)
        for bias, linear in zip(biases, linears, strict=True)
    ]
    return make(weight, torch.cat(whole))


def _norm(module) -> Float[Tensor, "width"]:
    return module.weight.detach().float().clone()


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype, copy=True)
