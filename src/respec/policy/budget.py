"""A fixed budget of tokens a step (C3PO; Ring-lite, arXiv 2506.14731): what of the samples is trained on now, and what waits for the next step.

A response that the budget's end falls into is cut there. Its later part is a sample whose prompt goes on with the earlier part: every
token keeps its context, its advantage, and the log-probability and version it was sampled under.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from respec.types import Prompt, Rollout, Sample, ScoredRollout, Stream


def spend(samples: Iterable[Sample], budget: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """The first samples, of `budget` tokens exactly where there are as many, and those left. Only the last of the first may be cut."""
    now, later, room = list[Sample](), list[Sample](), budget
    for sample in samples:
        length = len(sample.advantage_T)
        taken = min(room, length)
        if taken == length:
            now.append(sample)
        elif taken == 0:
            later.append(sample)
        else:
            now.append(part_of(sample, slice(0, taken)))
            later.append(part_of(sample, slice(taken, length)))
        room -= taken
    return tuple(now), tuple(later)


def tokens_of(samples: Iterable[Sample]) -> int:
    """Completion tokens."""
    return sum(len(sample.advantage_T) for sample in samples)


def part_of(sample: Sample, part: slice) -> Sample:
    """The sample of these of its tokens, those before them a part of its prompt. How the whole completion ended is kept."""
    rollout = sample.scored.rollout
    known = (*rollout.prompt.token_ids, *rollout.token_T[: part.start].tolist())
    # what is not by token stays as it is
    cut = dataclasses.replace(
        rollout,
        prompt=dataclasses.replace(rollout.prompt, token_ids=known),
        **{name: value[part] for name, value in _by_token(rollout).items()},
    )
    own = {name: value[part] for name, value in _by_token(sample).items()}
    return dataclasses.replace(sample, scored=dataclasses.replace(sample.scored, rollout=cut), **own)


def state_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples as flat tensors, for a checkpoint, bit for bit in what a learner reads: texts, columns, laws and reward parts are left out.

    Every field by token is kept that all of them have. Empty without samples.
    """
    if not samples:
        return {}
    rollouts = [sample.scored.rollout for sample in samples]
    numbers = [
        (r.prompt.row, r.draw, r.sample, int(r.stream), int(r.truncated), len(r.prompt.token_ids), len(r.token_T))
        for r in rollouts
    ]
    return {
        "number_SN": torch.tensor(numbers),
        "reward_S": torch.tensor([sample.scored.reward for sample in samples], dtype=torch.float64),
        "prompt": torch.cat([torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]),
        "rollout": _joined([_by_token(rollout) for rollout in rollouts]),
        "sample": _joined([_by_token(sample) for sample in samples]),
    }


def samples_from(state: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The samples that `state_of` kept."""
    if not state:
        return ()
    number_SN = state["number_SN"].tolist()
    prompts = state["prompt"].split([numbers[-2] for numbers in number_SN])
    lengths = [numbers[-1] for numbers in number_SN]
    rollouts, own = (_split(state[name], lengths) for name in ("rollout", "sample"))
    made = []
    for i, (row, draw, sample, stream, truncated, *_) in enumerate(number_SN):
        prompt = Prompt(row, "", tuple(prompts[i].tolist()))
        rollout = Rollout(
            prompt, Stream(stream), draw, sample, text="", finish="length" if truncated else "eos", **rollouts[i]
        )
        made.append(Sample(ScoredRollout(rollout, float(state["reward_S"][i]), {}), **own[i]))
    return tuple(made)


def _by_token(item: Rollout | Sample) -> dict[str, np.ndarray]:
    """The fields that have one entry a token: those with the suffix _T, and laws."""
    values = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return {name: value for name, value in values.items() if name.endswith(("_T", "_TK")) and value is not None}


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    shared = [name for name in parts[0] if name.endswith("_T") and all(name in part for part in parts)]
    return {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in shared}


def _split(joined: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> list[dict[str, Any]]:
    ends = np.cumsum(lengths)[:-1]
    split = {name: np.split(value.numpy(), ends) for name, value in joined.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(lengths))]
