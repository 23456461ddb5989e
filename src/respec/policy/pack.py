"""Packing: sequences laid end to end in flat tensors, without padding, cut into micro-batches by a token budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from respec.errors import TaskError
from respec.types import Batch, Rollout, Sample


def pack(samples: Sequence[Sample], tokens_per_microbatch: int, temperature: float) -> tuple[Batch, ...]:
    """Packs samples (prompt and completion) into batches of at most `tokens_per_microbatch` tokens, longest first, each of one temperature:
    the samples' own, or `temperature`.

    A sequence longer than the budget gets a batch of its own; sequences of one batch are of neighbouring lengths, so that
    attention pads little. Depends on the samples and their order alone. Raises TaskError for a prompt without tokens.
    """
    rollouts = [sample.scored.rollout for sample in samples]
    return tuple(
        _lay_out([samples[members[i]] for i in indices], degree)
        for degree, members in by_temperature(rollouts, temperature).items()
        for indices in bins([length_of(rollouts[i]) for i in members], tokens_per_microbatch)
    )


def by_temperature(rollouts: Sequence[Rollout], temperature: float) -> dict[float, list[int]]:
    """Indices of the rollouts by the temperature they were drawn at: their own, or `temperature`; in order."""
    alike: dict[float, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        own = rollout.sampling
        alike.setdefault(temperature if own is None else own.temperature, []).append(index)
    return alike


def bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths`, longest first (equal ones in their order), cut so that each bin's sum stays within the budget."""
    filled: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not filled or lengths[index] > room:
            filled.append([])
            room = budget
        filled[-1].append(index)
        room -= lengths[index]
    return filled


def lay_out(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int] | np.ndarray],
    temperature: float,
    advantage: Sequence[np.ndarray] = (),
    rollout_logprob: Sequence[np.ndarray] = (),
    kept_logmass: Sequence[np.ndarray] = (),
    weight: Sequence[np.ndarray] = (),
    truncated: Sequence[bool] = (),
    reference: Sequence[np.ndarray] = (),
    drawn: Sequence[np.ndarray] = (),
) -> Batch:
    """One batch of the sequences prompt + completion, in the order given; weights default to one, other numbers per completion token to zero.

    `drawn` says which of a completion's tokens the policy drew (by default all): the others are read, and are none of the C.
    """
    prompt_S = np.array([len(prompt) for prompt in prompts])
    completion_S = np.array([len(completion) for completion in completions])
    start = np.concatenate([[0], np.cumsum(prompt_S + completion_S)])
    pairs = zip(prompts, completions, strict=True)
    token = np.concatenate([np.asarray(part, dtype=np.int64) for pair in pairs for part in pair])
    first_S = start[:-1] + prompt_S
    completion_index = np.concatenate([np.arange(a, b) for a, b in zip(first_S, start[1:], strict=True)])
    sequence = np.repeat(np.arange(len(prompt_S)), completion_S)
    kept = np.concatenate(drawn) if len(drawn) else np.ones(len(completion_index), bool)
    completion_index, sequence = completion_index[kept], sequence[kept]
    position = np.arange(len(token)) - np.repeat(start[:-1], prompt_S + completion_S)

    def per_token(parts: Sequence[np.ndarray], default: float = 0.0) -> torch.Tensor:
        flat = np.concatenate(parts)[kept] if len(parts) else np.full(len(completion_index), default)
        return torch.from_numpy(flat.astype(np.float32))

    return Batch(
        token_N=torch.from_numpy(token),
        position_N=torch.from_numpy(position),
        start_S=torch.from_numpy(start),
        predict_C=torch.from_numpy(completion_index - 1),
        target_C=torch.from_numpy(token[completion_index]),
        sequence_C=torch.from_numpy(sequence),
        advantage_C=per_token(advantage),
        rollout_logprob_C=per_token(rollout_logprob),
        kept_logmass_C=per_token(kept_logmass),
        weight_C=per_token(weight, 1.0),
        temperature=temperature,
        truncated_S=torch.tensor(truncated or [False] * len(prompt_S)),
        reference_C=per_token(reference),
    )


def length_of(rollout: Rollout) -> int:
    """Tokens of prompt and completion. Raises TaskError for a prompt without tokens."""
    if not rollout.prompt.token_ids:
        raise TaskError(
            f"row {rollout.prompt.row}: the prompt has no tokens, so nothing predicts its completion's first token; "
            "give task.template some text, or use a tokenizer that begins with a BOS token"
        )
    return len(rollout.prompt.token_ids) + len(rollout.token_T)


def _lay_out(samples: Sequence[Sample], temperature: float) -> Batch:
    rollouts = [sample.scored.rollout for sample in samples]
    batch = lay_out(
        [rollout.prompt.token_ids for rollout in rollouts],
        [rollout.token_T for rollout in rollouts],
        temperature,
        advantage=[sample.advantage_T for sample in samples],
        rollout_logprob=[rollout.logprob_T - rollout.kept_logmass_T for rollout in rollouts],
        kept_logmass=[rollout.kept_logmass_T for rollout in rollouts],
        weight=[np.ones(len(r.token_T)) if r.weight_T is None else r.weight_T for r in rollouts],
        truncated=[rollout.truncated for rollout in rollouts],
        reference=[s.reference_T if s.reference_T is not None else np.zeros(len(s.advantage_T)) for s in samples],
        drawn=[rollout.drawn_T for rollout in rollouts],
    )
    return dataclasses.replace(batch, key_S=tuple(rollout.key for rollout in rollouts))
