"""transformers' own `generate` as a peer: a static batch, padded left. Run by the Python of its environment."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from wire import parts, serve  # pyright: ignore[reportMissingImports]


class Generate:
    """One model, loaded by `load`. The requests of the protocol are its methods."""

    model: Any = None

    def load(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        torch.set_num_threads(request["threads"])
        torch.manual_seed(0)
        dtype = getattr(torch, request["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=dtype, attn_implementation="sdpa"
        ).eval()
        return {"versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")}}

    @torch.inference_mode()
    def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Completions of `prompts`, `batch` at a time, at temperature 1: exactly `new_tokens` long, or up to that where `eos` ends them."""
        eos, tokens, logprobs, seconds = request["eos"], [], [], 0.0
        for part in parts(request["prompts"], request["batch"]):
            began = time.perf_counter()
            done, width = self._generate(part, request)
            seconds += time.perf_counter() - began
            kept = [_until(row, eos) for row in done.sequences[:, width:].tolist()]
            tokens += kept
            if request["logprobs"]:
                logp = torch.log_softmax(torch.stack(done.logits, dim=1).float(), dim=-1)
                logprobs += [logp[row, range(len(own)), own].tolist() for row, own in enumerate(kept)]
        return {"seconds": seconds, "tokens": tokens, "logprobs": logprobs, "drafted": 0, "accepted": 0, "drafts": 0}

    def _generate(self, prompts: Sequence[Sequence[int]], request: Mapping[str, Any]) -> tuple[Any, int]:
        width, eos = max(map(len, prompts)), request["eos"]
        pad = eos[0] if eos else 0
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        done = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad,
            max_new_tokens=request["new_tokens"], eos_token_id=eos or None, return_dict_in_generate=True,
            output_logits=request["logprobs"],
        )  # fmt: skip
        return done, width


def _until(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """The tokens up to and including the first that ends them; behind it is padding."""
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return list(tokens[: ends[0] + 1] if ends else tokens)


if __name__ == "__main__":
    peer = Generate()
    serve({"load": peer.load, "run": peer.run})
