"""Decoding through transformers' own modelling code: the reference, the GPU path, and the fallback.

The model is built a second time around the snapshot's weights, its attention replaced through the registry and its
linear layers prepacked.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from respec.models.adapted import plain_state
from respec.models.attention import lay_out
from respec.models.decoder import Branches, DecodeShape, KVStore, Pass
from respec.models.linear import MakeLinear, PackedLinear


class HFDecoder:
    """A `Decoder` over a copy of a Hugging Face causal LM; `linear` makes its products."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        version: int,
        linear: MakeLinear = PackedLinear,
    ) -> None:
        self.version = version
        self.shape = DecodeShape.of(model.config, dtype, device)
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = False
        with torch.device("meta"):
            snapshot = AutoModelForCausalLM.from_config(config, attn_implementation="respec_decode", dtype=dtype)
        # rotary tables are made from the configuration and are not in the state dict: take the trained model's own
        for name, buffer in model.named_buffers():
            _set(snapshot, name, buffer.detach().to(device, copy=True))
        for name, parameter in plain_state(model):
            _set(snapshot, name, nn.Parameter(parameter.detach().to(device, dtype, copy=True), requires_grad=False))
        for name, module in list(snapshot.named_modules()):
            if isinstance(module, nn.Linear):
                weight, bias = module.weight.data, module.bias.data if module.bias is not None else None
                _set(snapshot, name, linear(weight, bias))
        snapshot.eval()
        self._body, self._head = snapshot.model, snapshot.lm_head

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
        tokens = torch.from_numpy(token_M).to(self.shape.device)[None]
        layout = lay_out(slot_M, position_M, self.shape, branches)
        done = self._body(
            input_ids=tokens, position_ids=layout.position_M[None], use_cache=False, kv=cache, layout=layout,
            output_hidden_states=bool(taps),
        )  # fmt: skip
        tapped = torch.cat([done.hidden_states[layer][0].float() for layer in taps], dim=1) if taps else None
        return Pass(done.last_hidden_state[0], tapped)

    @torch.inference_mode()
    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R V"]:
        return self._head(hidden)


def _set(root: nn.Module, name: str, value: Tensor | nn.Module) -> None:
    *path, last = name.split(".")
    owner = root.get_submodule(".".join(path))
    setattr(owner, last, value)
