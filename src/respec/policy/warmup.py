"""Supervised warm-up: completion-only cross-entropy on a task's worked solutions, through the learner's own packing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool

from respec.config import WarmupConfig
from respec.errors import TaskError
from respec.models.load import Policy
from respec.policy.logprobs import token_logprobs
from respec.policy.optim import adamw, checked_step, learning_rate
from respec.policy.pack import bins, lay_out
from respec.types import Prompt, Shown, WarmupStats

TOKENS_PER_MICROBATCH = 4096
LOGIT_CHUNK = 1024


def warm_up(
    policy: Policy,
    pairs: Sequence[tuple[Prompt, str | Shown]],
    config: WarmupConfig,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> WarmupStats:
    """Trains `policy.model` in place for `config.steps` optimizer steps on (prompt, solution), EOS appended to each that is a text.

    Loss: mean over the batch's solution tokens (nats). Rate: up over `config.warmup_steps`, then a cosine down to zero.
    Batches walk through permutations of the pairs, drawn from `seed`; same inputs, same weights. `on_step(steps done, loss)`.
    Raises TaskError without pairs, or for one that is longer than the context or empty; NonFiniteError before it can spread.
    """
    began = time.perf_counter()
    if config.steps == 0:
        return WarmupStats(0, 0.0, 0.0, 0, 0.0)
    encoded = [_encode(policy, prompt, solution) for prompt, solution in pairs]
    if not encoded:
        raise TaskError(
            "warmup.steps is set, but the task has no worked solutions; set task.solution or task.solution_column"
        )
    optimizer = adamw(policy.model, config.weight_decay)
    order = _endless(len(encoded), seed)
    losses: list[float] = []
    tokens = 0
    try:
        for step in range(config.steps):
            chosen = [encoded[next(order)] for _ in range(config.batch_size)]
            loss, passed = _accumulate(policy, chosen)
            lr = learning_rate(step, config.steps, config.lr, config.warmup_steps, "cosine")
            checked_step(optimizer, lr, config.grad_clip, loss, f"warm-up step {step + 1}")
            losses.append(loss)
            tokens += passed
            if on_step is not None:
                on_step(step + 1, loss)
    finally:
        optimizer.zero_grad()
    return WarmupStats(len(losses), losses[0], losses[-1], tokens, time.perf_counter() - began)


@dataclass(frozen=True)
class _Pair:
    """Prompt and completion in tokens, and which of the completion's are learned."""

    prompt: tuple[int, ...]
    completion: Sequence[int]
    own: Bool[np.ndarray, "T"]


def _encode(policy: Policy, prompt: Prompt, solution: str | Shown) -> _Pair:
    if isinstance(solution, Shown):
        completion, own = list(solution.token_ids), np.array(solution.own, bool)
    else:
        completion = policy.tokenizer(solution, add_special_tokens=False)["input_ids"]
        eos = policy.tokenizer.eos_token_id
        completion = [*completion, policy.eos_token_ids[0] if eos is None else eos]
        own = np.ones(len(completion), bool)
    length = len(prompt.token_ids) + len(completion)
    if not prompt.token_ids:
        raise TaskError(f"row {prompt.row}: the prompt has no tokens; give task.template some text")
    if length > policy.context_length:
        raise TaskError(
            f"row {prompt.row}: prompt and worked solution are {length} tokens, the model's context is {policy.context_length}; "
            "make the task easier or leave such rows out"
        )
    return _Pair(prompt.token_ids, completion, own)


def _endless(count: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()


def _accumulate(policy: Policy, chosen: Sequence[_Pair]) -> tuple[float, int]:
    """Adds the batch's gradient, micro-batch by micro-batch; gives its loss and how many tokens went forward."""
    device = policy.model.device
    targets = sum(int(pair.own.sum()) for pair in chosen)
    lengths = [len(pair.prompt) + len(pair.completion) for pair in chosen]
    loss = 0.0
    for indices in bins(lengths, TOKENS_PER_MICROBATCH):
        parts = [chosen[i] for i in indices]
        batch = lay_out([p.prompt for p in parts], [p.completion for p in parts], 1.0, drawn=[p.own for p in parts])
        moved = {key: value.to(device) for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        logprob_C, _ = token_logprobs(policy.model, dataclasses.replace(batch, **moved), LOGIT_CHUNK)
        share = -logprob_C.sum() / targets
        share.backward()
        loss += share.item()
    return loss, sum(lengths)
