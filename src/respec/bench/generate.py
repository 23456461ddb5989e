"""Plain decoding against transformers' `generate`: the same prompts, lengths and threads, interleaved repeats, medians, ratios first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from respec.bench.record import refuse_dirty, write_result
from respec.config import ModelConfig
from respec.models.load import load_policy
from respec.report.provenance import usable_cores
from respec.rollout.engine import Engine
from respec.types import Ask, Prompt, Sampling, Stream
from respec.weights.publish import publish

QUESTIONS = (
    "What is {a} plus {b} times {c}? Explain each step.",
    "Write a short story about a number {a} that met {b} and {c}.",
    "List {a} things that are larger than {b} but smaller than {c}.",
    "Why would somebody trade {a} apples for {b} pears and {c} plums?",
)


def bench_against_generate(
    model: str,
    batches: Sequence[int],
    prompts: int,
    new_tokens: int,
    repeats: int,
    threads: int,
    out: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Plain decoding, exactness on, in the decoding dtype, against transformers' `generate` in float32 with a static batch.

    Every completion has exactly `new_tokens` tokens at temperature 1, so both do the same work. Writes JSON to `out` when given;
    raises ConfigError for that in a git tree with uncommitted changes, since a result must name the code it measured.
    """
    if out is not None:
        refuse_dirty()
    torch.set_num_threads(threads or usable_cores())
    policy = load_policy(ModelConfig(path=model, device="cpu"))
    tokenizer: Any = policy.tokenizer
    texts = [QUESTIONS[i % len(QUESTIONS)].format(a=i + 2, b=3 * i + 1, c=7 * i + 5) for i in range(prompts)]
    asked = [Prompt(row, text, tuple(tokenizer(text)["input_ids"])) for row, text in enumerate(texts)]
    decoder = publish(policy, "auto", 0)
    peer: Any = policy.model
    peer.set_attn_implementation("sdpa")
    rows = []
    for batch in batches:
        engine = Engine(decoder, policy.tokenizer, (), 0, max_batch=batch)
        # at least one full batch; small batches take fewer prompts, or one repeat would last minutes
        count = max(batch, min(prompts, 4 * batch))
        chosen = [asked[i % prompts] for i in range(count)]
        asks = [Ask(Prompt(i, p.text, p.token_ids), Stream.BENCH, 0, 1) for i, p in enumerate(chosen)]
        ours, theirs, entropy = [], [], 0.0
        for repeat in range(repeats + 1):
            rollouts, stats = engine.rollout(asks, Sampling(new_tokens))
            seconds = _generate(peer, policy.pad_token_id, chosen, batch, new_tokens)
            if repeat:  # the first round warms both up
                ours.append(stats.tokens_per_s)
                theirs.append(count * new_tokens / seconds)
            entropy = float(sum(r.entropy_T.sum() for r in rollouts) / stats.tokens)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append({
            "batch": batch, "prompts": count, "new_tokens": new_tokens, "respec_tokens_per_s": statistics.median(ours),
            "generate_tokens_per_s": statistics.median(theirs), "ratio": statistics.median(ratios), "ratio_min": min(ratios),
            "ratio_max": max(ratios), "policy_entropy": entropy, "temperature": 1.0,
        })  # fmt: skip
        say(
            f"batch {batch}: {rows[-1]['ratio']:.2f}x ({rows[-1]['respec_tokens_per_s']:.0f} against {rows[-1]['generate_tokens_per_s']:.0f} tokens/s)"
        )
    return write_result(out, {
        "what": "plain decoding, exactness on, against transformers generate in float32", "model": Path(model).name, "repeats": repeats,
        "dtype": str(decoder.shape.dtype).removeprefix("torch."), "rows": rows,
    })  # fmt: skip


def _generate(model: Any, pad: int, prompts: Sequence[Prompt], batch: int, new_tokens: int) -> float:
    """Seconds of transformers' own sampling over the prompts, `batch` at a time, padded left."""
    began = time.perf_counter()
    for start in range(0, len(prompts), batch):
        part = [prompt.token_ids for prompt in prompts[start : start + batch]]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad,
                min_new_tokens=new_tokens, max_new_tokens=new_tokens, eos_token_id=None,
            )  # fmt: skip
    return time.perf_counter() - began
