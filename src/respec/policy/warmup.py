"""Supervised warm-up: completion-only cross-entropy on a task's worked solutions, through the learner's own packing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from respec.config import WarmupConfig
from respec.errors import TaskError
from respec.models.load import Policy
from respec.policy.logprobs import token_logprobs
from respec.policy.optim import adamw, checked_step, learning_rate
from respec.policy.pack import bins, lay_out
from respec.types import Prompt, WarmupStats

TOKENS_PER_MICROBATCH = 4096
LOGIT_CHUNK = 1024


def warm_up(
    policy: Policy,
    pairs: Sequence[tuple[Prompt, str]],
    config: WarmupConfig,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> WarmupStats:
    """Trains `policy.model` in place for `config.steps` optimizer steps on (prompt, solution), EOS appended to each solution.

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


def _encode(policy: Policy, prompt: Prompt, solution: str) -> tuple[tuple[int, ...], list[int]]:
    completion = policy.tokenizer(solution, add_special_tokens=False)["input_ids"]
    eos = policy.tokenizer.eos_token_id
    completion = [*completion, policy.eos_token_ids[0] if eos is None else eos]
    length = len(prompt.token_ids) + len(completion)
    if not prompt.token_ids:
        raise TaskError(f"row {prompt.row}: the prompt has no tokens; give task.template some text")
    if length > policy.context_length:
        raise TaskError(
            f"row {prompt.row}: prompt and worked solution are {length} tokens, the model's context is {policy.context_length}; "
            "make the task easier or leave such rows out"
        )
    return prompt.token_ids, completion


def _endless(count: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()


def _accumulate(policy: Policy, chosen: Sequence[tuple[tuple[int, ...], list[int]]]) -> tuple[float, int]:
    """Adds the batch's gradient, micro-batch by micro-batch; gives its loss and how many tokens went forward."""
    device = policy.model.device
    targets = sum(len(completion) for _, completion in chosen)
    lengths = [len(prompt) + len(completion) for prompt, completion in chosen]
    loss = 0.0
    for indices in bins(lengths, TOKENS_PER_MICROBATCH):
        batch = lay_out([chosen[i][0] for i in indices], [chosen[i][1] for i in indices], temperature=1.0)
        moved = {key: value.to(device) for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        logprob_C, _ = token_logprobs(policy.model, dataclasses.replace(batch, **moved), LOGIT_CHUNK)
        share = -logprob_C.sum() / targets
        share.backward()
        loss += share.item()
    return loss, sum(lengths)
