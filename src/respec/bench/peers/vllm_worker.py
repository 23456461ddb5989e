"""vLLM as a peer: its CPU build in bfloat16, with or without its own speculative decoding. Run by the Python of its environment."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Mapping
from typing import Any

from wire import parts, serve  # pyright: ignore[reportMissingImports]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
COUNTERS = ("num_draft_tokens", "num_accepted_tokens", "num_drafts")


class Vllm:
    """One engine, made by `load`. The requests of the protocol are its methods."""

    llm: Any = None

    def load(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """An engine of `threads` threads for `batch` sequences of up to `context` tokens.

        `speculation`: None, `ngram`, or the folder of an EAGLE-3 head, which drafts `depth` tokens. `eager`: without compilation, to start soon. `mended`: see
        `vllm_mended`.
        """
        cores = sorted(os.sched_getaffinity(0))[: request["threads"]]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        }  # fmt: skip
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        speculation = request["speculation"]
        if speculation == "ngram":
            speculation = NGRAM
        elif speculation is not None:
            speculation = {"method": "eagle3", "model": speculation, "num_speculative_tokens": request["depth"]}
        self.llm = LLM(
            model=request["model"], dtype=request["dtype"], max_model_len=request["context"], max_num_seqs=request["batch"],
            speculative_config=speculation, disable_log_stats=False, seed=0, generation_config="vllm", enforce_eager=request["eager"],
            worker_cls="vllm_mended.Worker" if request["mended"] else "auto",
        )  # fmt: skip
        return {"versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}}

    def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Completions of `prompts`, `batch` at a time: exactly `new_tokens` long, or up to that where `eos` ends them."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        sampling = SamplingParams(
            temperature=request["temperature"], max_tokens=request["new_tokens"], ignore_eos=True, stop_token_ids=request["eos"],
            detokenize=False, logprobs=0 if request["logprobs"] else None,
        )  # fmt: skip
        before, outputs, began = self._counters(), [], time.perf_counter()
        for part in parts(request["prompts"], request["batch"]):
            done = self.llm.generate([{"prompt_token_ids": prompt} for prompt in part], sampling, use_tqdm=False)
            outputs += [one.outputs[0] for one in done]
        seconds = time.perf_counter() - began
        drafted, accepted, drafts = (now - then for now, then in zip(self._counters(), before, strict=True))
        logprobs = [
            [at[token].logprob for at, token in zip(one.logprobs or (), one.token_ids, strict=False)] for one in outputs
        ]
        return {
            "seconds": seconds, "tokens": [list(one.token_ids) for one in outputs], "logprobs": logprobs, "drafted": drafted,
            "accepted": accepted, "drafts": drafts,
        }  # fmt: skip

    def _counters(self) -> tuple[int, int, int]:
        """Tokens drafted, tokens accepted and drafts, since the engine was made."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        drafted, accepted, drafts = (int(values.get(f"vllm:spec_decode_{name}", 0)) for name in COUNTERS)
        return drafted, accepted, drafts


if __name__ == "__main__":
    peer = Vllm()
    serve({"load": peer.load, "run": peer.run})
