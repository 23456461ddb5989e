"""Do a peer's samples follow the model's own distribution? The statistics of `respec certify`, on what the peer returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from respec.bench.peers.process import Worker
from respec.certify.finding import Finding
from respec.certify.honesty import allowed_mean
from respec.certify.reference import Reference
from respec.certify.sampler import judge_samples
from respec.types import Prompt, Rollout, Stream

# As in a certificate: completions of 32 tokens, and many of two for their first tokens.
TOKENS, LONG, SHORT = 2048, 32, 2
PROMPTS, SHORTS = 8, 512
# In flight at once, whatever batch is timed: what is sampled does not depend on it, how long this takes does.
BATCH = 64


def judge_peer(worker: Worker, dtype: str, prompts: Sequence[Prompt], reference: Reference) -> tuple[Finding, ...]:
    """Draws about `TOKENS` tokens after the first few prompts, untimed, and judges them. Raises ConfigError when the peer fails."""
    few = list({prompt.token_ids: prompt for prompt in prompts}.values())[:PROMPTS]
    drawn = draw(worker, few, TOKENS // LONG // len(few), LONG)
    short = draw(worker, few, SHORTS // len(few), SHORT)
    kind = getattr(torch, dtype)
    allowed = allowed_mean(reference, drawn, 1.0, kind)
    return tuple(judge_samples(worker.name, drawn, short, 1.0, reference, kind, allowed))


def draw(worker: Worker, prompts: Sequence[Prompt], each: int, new_tokens: int) -> list[Rollout]:
    """`each` completions of every prompt, of exactly `new_tokens` tokens."""
    asked = [prompt for prompt in prompts for _ in range(each)]
    answer = worker.ask(
        "run", prompts=[prompt.token_ids for prompt in asked], batch=BATCH, new_tokens=new_tokens, eos=[], temperature=1.0, logprobs=True
    )  # fmt: skip
    return as_rollouts(asked, answer)


def as_rollouts(prompts: Sequence[Prompt], answer: dict[str, Any]) -> list[Rollout]:
    """A peer's answer in the form that the statistics read. What a peer does not tell is zero, and is not read by them."""
    made = []
    for sample, (prompt, tokens, logprobs) in enumerate(
        zip(prompts, answer["tokens"], answer["logprobs"], strict=True)
    ):
        count = len(tokens)
        zero = np.zeros(count, np.float32)
        made.append(
            Rollout(
                prompt, Stream.BENCH, 0, sample, np.array(tokens, np.int32), np.array(logprobs, np.float32), zero, zero,
                np.zeros(count, np.int32), np.zeros(count, np.uint8), np.zeros(count, np.int32), "", "length",
            )
        )  # fmt: skip
    return made
