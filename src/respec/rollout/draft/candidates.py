"""What a drafter whose distribution is over a part of the vocabulary puts forward: the earliest arrivals of a race (see `rollout.sampling`).

In `matching` it races with the target's own numbers, so that a law close to the target's wins with the same token; candidates are then
as good as looked up, and only the most probable need to race. In `rejection` it draws with its own numbers, and must say from what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt64
from torch import Tensor

from respec.rollout.draft.comb import Arrivals
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.randomness import uniform
from respec.rollout.sampling import process, race, racers, truncates
from respec.types import Sampling


def candidates(
    logits: Float[Tensor, "B draft"],
    draft_token: Int64[np.ndarray, "draft"],
    vocabulary: int,
    key_B: UInt64[np.ndarray, "B"],
    first_B: Sequence[int],
    context: DraftContext,
) -> list[Arrivals]:
    """For each row its `first` earliest arrivals, from logits over the draft vocabulary, processed like the target's.

    `key_B` are the keys of the tokens to be drafted, in the lane of the mode (see `comb.lane`). A row whose logits are not finite has
    none.
    """
    if context.mode == "matching":
        arrived, lead = _shared_race(
            logits, draft_token, key_B, context.sampling, max(first_B), context.cut is not None
        )
        return [
            Arrivals(row[row >= 0][:first], lead=ahead)
            for row, first, ahead in zip(arrived, first_B, lead.tolist(), strict=True)
        ]
    drawn = []
    for row, x in enumerate(logits.double().cpu().numpy()):
        if not np.isfinite(x).all():
            drawn.append(Arrivals(np.zeros(0, np.int64)))
            continue
        q = process(x, context.sampling).p
        law = np.zeros(vocabulary)
        law[draft_token] = q
        winners = race(q, key_B[row : row + 1], first_B[row])
        drawn.append(Arrivals(draft_token[winners], law))
    return drawn


def _shared_race(
    logits: Float[Tensor, "B draft"],
    draft_token: Int64[np.ndarray, "draft"],
    key: UInt64[np.ndarray, "B"],
    sampling: Sampling,
    first: int,
    leads: bool,
) -> tuple[Int64[np.ndarray, "B first"], Float64[np.ndarray, "B"]]:
    """The earliest arrivals among the most probable draft tokens, -1 where fewer arrive; and with `leads` how far ahead the first was (greedily:
    how much more probable)."""
    top = torch.topk(logits, min(racers(logits.shape[1]), logits.shape[1]), dim=1)
    token = draft_token[top.indices.cpu().numpy()]
    if sampling.temperature == 0:
        return token[:, :first], _lead(-top.values.double().cpu().numpy(), leads)
    x = top.values.double().cpu().numpy() / sampling.temperature
    rate = np.exp(x - x[:, :1])
    if truncates(sampling):
        rate = _truncated(rate, logits, sampling)
    with np.errstate(divide="ignore"):
        arrival = -np.log(uniform(key[:, None], token.view(np.uint64))) / rate
    order = arrival.argmin(axis=1)[:, None] if first == 1 else np.argsort(arrival, axis=1)[:, :first]
    rows = np.arange(len(order))[:, None]
    found = np.where(np.isfinite(arrival[rows, order]), token[rows, order], -1)
    with np.errstate(divide="ignore"):
        return found, _lead(np.log(arrival), leads)


def _lead(late: Float64[np.ndarray, "B m"], leads: bool) -> Float64[np.ndarray, "B"]:
    """By how much the second is later than the first; endless where none is to be known or there is no second."""
    if not leads or late.shape[1] < 2:
        return np.full(len(late), np.inf)
    first, second = np.partition(late, 1, axis=1)[:, :2].T
    return np.where(np.isfinite(second), second - first, np.inf)


def _truncated(
    rate: Float64[np.ndarray, "B m"], logits: Float[Tensor, "B draft"], sampling: Sampling
) -> Float64[np.ndarray, "B m"]:
    """Rates (largest first, relative to the largest) with those that top-k, top-p and min-p drop at nought."""
    if sampling.top_k:
        rate = np.where(np.arange(rate.shape[1]) < sampling.top_k, rate, 0.0)
        whole = rate.sum(axis=1)
    else:
        x = logits.double() / sampling.temperature
        whole = (x - x.max(dim=1, keepdim=True).values).exp().sum(dim=1).cpu().numpy()
    before = np.cumsum(rate, axis=1) - rate
    stays = (before < sampling.top_p * whole[:, None]) & (rate >= sampling.min_p)
    stays[:, 0] = True
    return np.where(stays, rate, 0.0)
