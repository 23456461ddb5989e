"""vLLM as a peer: its CPU build, bfloat16, with or without its own speculative decoding. Run in an environment of its own."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Mapping
from typing import Any

from wire import serve  # pyright: ignore[reportMissingImports]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Vllm:
    """One engine, made by `load`. Requests of the protocol are its methods."""

    llm: Any = None

    def load(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """An engine of `threads` threads that holds `batch` sequences of up to `context` tokens.

        `speculation`: None, `ngram`, or the folder of an EAGLE-3 head, which drafts `depth` tokens.
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
            model=request["model"], dtype="bfloat16", max_model_len=request["context"], max_num_seqs=request["batch"],
            speculative_config=speculation, disable_log_stats=False, seed=0, generation_config="vllm", enforce_eager=request["eager"],
        )  # fmt: skip
        return {"versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}}

    def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Completions of `prompts` of up to `new_tokens` tokens at temperature 1: exactly so many where `eos` is empty."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        sampling = SamplingParams(
            temperature=1.0, max_tokens=request["new_tokens"], ignore_eos=True, stop_token_ids=request["eos"],
            detokenize=False, logprobs=0 if request["logprobs"] else None,
        )  # fmt: skip
        asked = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        before = self._counters()
        began = time.perf_counter()
        done = self.llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        drafted, accepted, rounds = (now - then for now, then in zip(self._counters(), before, strict=True))
        outputs = [one.outputs[0] for one in done]
        answer = {
            "seconds": seconds, "tokens": [list(one.token_ids) for one in outputs], "drafted": drafted, "accepted": accepted,
            "rounds": rounds,
        }  # fmt: skip
        if request["logprobs"]:
            answer["logprobs"] = [
                [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)] for one in outputs
            ]
        return answer

    def _counters(self) -> tuple[int, int, int]:
        """Tokens drafted and accepted, and drafts, since the engine was made."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
        drafted, accepted, drafts = (int(values.get(f"vllm:spec_decode_{name}", 0)) for name in names)
        return drafted, accepted, drafts


if __name__ == "__main__":
    peer = Vllm()
    serve({"load": peer.load, "run": peer.run})
