"""Check a, law 1: with the same seeds, tokens and log-probabilities with speculation on equal those with it off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from respec.certify.finding import Finding
from respec.certify.protocol import ROUNDING, Margin
from respec.types import Proposer, Rollout

# What stands for a token where a completion has none any more.
ENDED = -1


@dataclass(frozen=True)
class Difference:
    """The earliest place at which a completion with speculation leaves the one without.

    `token`, `logprob`: without and with (a token ENDED has no log-probability: NaN). `gap` is the largest difference of log-probability
    up to there, over tokens that are the same. At a place where only log-probabilities differ the tokens are equal.
    """

    plain: Rollout
    position: int
    token: tuple[int, int]
    logprob: tuple[float, float]
    gap: float


def first_difference(plain: Sequence[Rollout], other: Sequence[Rollout]) -> Difference | None:
    """The first differing token over all completions, else the first differing log-probability, else None."""
    found = [
        difference for a, b in zip(plain, other, strict=True) if (difference := _where_they_part(a, b)) is not None
    ]
    return min(found, key=lambda d: (d.token[0] == d.token[1], d.position), default=None)


@dataclass(frozen=True)
class Explain:
    """What a difference is explained by: the model's log-probabilities after some tokens, the race, and the text of a token."""

    after: Callable[[Sequence[int]], Float64[np.ndarray, "V"]]
    margin: Margin
    text: Callable[[int], str]


def same_tokens(
    subject: str,
    plain: Sequence[Rollout],
    drafted: Mapping[int, Sequence[Rollout]],
    dtype: torch.dtype,
    explain: Explain,
) -> Finding:
    """Compares completions of the same keys, `drafted` ones by batch size. `plain` may hold more of them."""
    known = {(rollout.stream, *rollout.key): rollout for rollout in plain}
    figures = {"completions": 0, "tokens": 0, "accepted": 0}
    for batch, rollouts in drafted.items():
        keys = [(rollout.stream, *rollout.key) for rollout in rollouts]
        unknown = sum(key not in known for key in keys)
        if unknown or len(set(keys)) < len(keys) or not keys:
            sentence = (
                f"in batches of {batch} the completions that came back are not those asked for: {len(keys)} came, "
                f"{unknown} of them unasked"
            )
            return Finding("same tokens", subject, "failed", sentence)
        figures["completions"] += len(rollouts)
        figures["tokens"] += sum(len(rollout.token_T) for rollout in rollouts)
        figures["accepted"] += sum(int((rollout.proposer_T != Proposer.TARGET).sum()) for rollout in rollouts)
        first = first_difference([known[key] for key in keys], rollouts)
        if first is not None:
            return _explained(subject, batch, first, dtype, explain)
    if not figures["accepted"]:
        sentence = (
            f"{figures['tokens']} tokens are the same, but no draft was ever accepted, so that nothing was tried; "
            "give prompts that repeat themselves"
        )
        return Finding("same tokens", subject, "unchecked", sentence, figures)
    sentence = (
        f"{figures['tokens']} tokens of {figures['completions']} completions and their log-probabilities are the same to the bit "
        f"in batches of {', '.join(map(str, drafted))} ({figures['accepted']} were drafted)"
    )
    return Finding("same tokens", subject, "passed", sentence, figures)


def _where_they_part(plain: Rollout, other: Rollout) -> Difference | None:
    shared = min(len(plain.token_T), len(other.token_T))
    apart = np.abs(plain.logprob_T[:shared].astype(np.float64) - other.logprob_T[:shared])
    differs = np.flatnonzero(plain.token_T[:shared] != other.token_T[:shared])
    position = int(differs[0]) if len(differs) else shared
    if len(differs) == 0 and len(plain.token_T) == len(other.token_T):
        # written so that a NaN differs from everything
        off = np.flatnonzero(~(apart == 0))
        if len(off) == 0:
            return None
        position = int(off[0])
        return Difference(plain, position, *_pair(plain, other, position), gap=float(apart.max()))
    return Difference(plain, position, *_pair(plain, other, position), gap=float(apart[:position].max(initial=0.0)))


def _pair(plain: Rollout, other: Rollout, position: int) -> tuple[tuple[int, int], tuple[float, float]]:
    def at(rollout: Rollout) -> tuple[int, float]:
        if position >= len(rollout.token_T):
            return ENDED, float("nan")
        return int(rollout.token_T[position]), float(rollout.logprob_T[position])

    (one, its), (two, others) = at(plain), at(other)
    return (one, two), (its, others)


def _explained(subject: str, batch: int, first: Difference, dtype: torch.dtype, explain: Explain) -> Finding:
    """Tells rounding from a bug: rounding moves log-probabilities a little, and a token only where two were nearly tied in the race."""
    lead, rounding = None, ROUNDING[dtype]
    if first.token[0] != first.token[1] and ENDED not in first.token:
        known = [*first.plain.prompt.token_ids, *first.plain.token_T[: first.position].tolist()]
        lead = explain.margin(first.plain, first.position, explain.after(known), *first.token)
    figures = {
        "batch": batch, "row": first.plain.prompt.row, "sample": first.plain.sample, "position": first.position,
        "token_plain": first.token[0], "token_drafted": first.token[1], "logprob_plain": first.logprob[0],
        "logprob_drafted": first.logprob[1], "gap": first.gap, "margin": lead,
    }  # fmt: skip
    where = (
        f"prompt {first.plain.prompt.row}, sample {first.plain.sample}, token {first.position}, in batches of {batch}"
    )
    one, two = (
        "the end" if token == ENDED else f"{explain.text(token)!r} (log-probability {value:.4f})"
        for token, value in zip(first.token, first.logprob, strict=True)
    )
    if first.token[0] == first.token[1]:
        seen = f"the tokens are the same, log-probabilities differ by up to {first.gap:.2g} nats, first at {where}"
    else:
        raced = "" if lead is None else f"; the former leads the race by {lead:.2g} nats"
        seen = f"at {where}, {one} became {two}{raced}; log-probabilities up to there differ by at most {first.gap:.2g}"
    return Finding("same tokens", subject, "failed", f"{seen}: {_cause(first, lead, rounding)}", figures)


def _cause(first: Difference, lead: float | None, rounding: float) -> str:
    if not first.gap <= rounding:
        return "more than rounding can do; a bug, in the cache, the positions or what is recorded"
    if first.token[0] == first.token[1]:
        return "numerics, a kernel whose bits depend on the batch; the draft is judged rightly"
    if ENDED in first.token:
        return "a bug, in where a completion is ended"
    if lead is None:
        return "whether by rounding or a bug cannot be said, since the two did not race each other one by one"
    # either log-probability may be off by the rounding
    if abs(lead) <= 2 * rounding:
        return "a near tie that rounding decided: numerics, not a wrong verification"
    return "too clear a lead for rounding to turn; a bug, in the verification or in the keys of the random numbers"
