"""Combs: what a drafter with a distribution of its own proposes. A chain of its draws, and beside each the draws that would have come next.

In `matching` it races with the target's own numbers, so that where the two distributions are near, the two draws are mostly one (Daliri et
al. 2024, arXiv 2408.07978). In `rejection` it races with numbers of its own and says from what. Which nodes there are is settled by the plan
before anything is drawn, as `rejection` demands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt64
from torch import Tensor

from respec.models.decoder import Decoder
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import Lane, token_key
from respec.rollout.request import Request
from respec.rollout.sampling import draw, process, race, racers, truncates
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Sampling


def widths(plan: Plan, limit: int) -> tuple[int, ...]:
    """How many children hang on the pending token, on the chain's first token, and so on.

    The chain is as deep as plan.s, plan.n and the limit allow; what is left of plan.n goes to siblings, plan.t - 1 to a parent,
    shallowest first.
    """
    depth = max(0, min(plan.s, plan.n, limit))
    spare, found = plan.n - depth, list[int]()
    for _ in range(depth):
        siblings = min(plan.t - 1, spare)
        spare -= siblings
        found.append(1 + siblings)
    return tuple(found)


@dataclass(frozen=True)
class Arrivals:
    """The first to arrive in one race, earliest first; `law` is what they were drawn from, in `rejection` only. `lead` is the log of the second
    arrival over the first, where it was asked for."""

    token: Int64[np.ndarray, "k"]
    law: Float64[np.ndarray, "V"] | None = None
    lead: float = math.inf


def race_rows(
    logits: Float[Tensor, "R V"], key: UInt64[np.ndarray, "R"], first_R: Sequence[int], context: DraftContext
) -> list[Arrivals]:
    """For each row of a drafter's logits its `first` earliest arrivals; `key` is the token's, on the lane that `lane(mode)` says."""
    if context.mode == "rejection":
        laws = _laws(logits, context.sampling)
        return [
            Arrivals(race(law, key[r : r + 1], first), law)
            for r, (law, first) in enumerate(zip(laws, first_R, strict=True))
        ]
    if max(first_R) == 1:
        # the target's own sampler: from the target's own distribution it draws the target's own token
        return [Arrivals(token[None]) for token in draw(logits, key, context.sampling).token.astype(np.int64)]
    top = torch.topk(logits.float(), racers(logits.shape[1]), dim=1)
    rows = zip(top.values.double().cpu().numpy(), top.indices.cpu().numpy(), first_R, strict=True)
    return [_among(x, token, key[r : r + 1], first, context) for r, (x, token, first) in enumerate(rows)]


def lane(context: DraftContext) -> Lane:
    """Whose numbers a drafter races with."""
    return Lane.TARGET if context.mode == "matching" else Lane.DRAFT


@dataclass
class Comb:
    """One request's draft in the making."""

    request: Request
    width_D: Sequence[int]
    chain: list[int] = field(default_factory=list)
    siblings: list[tuple[int, int]] = field(default_factory=list)
    law: dict[int, Float64[np.ndarray, "V"]] = field(default_factory=dict)
    lead: list[float] = field(default_factory=list)
    left_out: int | None = None
    stands: float = 1.0

    @property
    def wants(self) -> bool:
        """Whether its chain is to go on."""
        return len(self.chain) < len(self.width_D)

    def key(self, context: DraftContext) -> UInt64[np.ndarray, "1"]:
        """Of the token that the chain wants next."""
        index = np.array([len(self.request.tokens) + len(self.chain)])
        return token_key(self.request.key, index, lane(context))

    def add(self, arrivals: Arrivals) -> None:
        """Hangs the next children on the chain's end; where none arrived the comb ends."""
        parent = len(self.chain) - 1
        if arrivals.law is not None:
            self.law[parent] = arrivals.law
        if not len(arrivals.token):
            self.width_D = self.width_D[: len(self.chain)]
            return
        first, *others = arrivals.token.tolist()
        self.chain.append(first)
        self.siblings += [(parent, token) for token in others]

    def sift(self, arrivals: Arrivals, chance: float, floor: float) -> None:
        """Puts the first to arrive on the chain's end while the whole of it stands with a chance of `floor`; else leaves it out, and ends."""
        self.stands *= chance
        self.lead += [arrivals.lead] * len(arrivals.token)
        if self.stands >= floor or not len(arrivals.token):
            self.add(arrivals)
            return
        self.left_out = int(arrivals.token[0])
        self.width_D = self.width_D[: len(self.chain)]

    def tree(self, proposer: Proposer) -> DraftTree:
        """The chain's nodes first, then the siblings, shallowest first."""
        parents, tokens = zip(*self.siblings, strict=True) if self.siblings else ((), ())
        parent = (*range(-1, len(self.chain) - 1), *parents)
        return DraftTree(
            (*self.chain, *tokens), parent, proposer, self.law, lead_n=tuple(self.lead), left_out=self.left_out
        )


def grow(combs: Sequence[Comb], logits: Float[Tensor, "R V"], context: DraftContext) -> None:
    """One more depth for combs that want it, from the drafter's logits after the end of each one's chain."""
    keys = np.concatenate([comb.key(context) for comb in combs])
    first = [comb.width_D[len(comb.chain)] for comb in combs]
    for comb, arrivals in zip(combs, race_rows(logits, keys, first, context), strict=True):
        comb.add(arrivals)


@dataclass(frozen=True)
class Feed:
    """Tokens of one sequence from position `start` on, the last of them the pending one: what a draft decoder is to read first."""

    slot: int
    start: int
    tokens: Sequence[int]


def by_steps(
    decoder: Decoder, cache: KVCache, combs: Sequence[Comb], feeds: Sequence[Feed], context: DraftContext, chunk: int
) -> None:
    """Grows combs with a decoder: passes of at most `chunk` tokens over what it has to read, then one over all chains' ends a depth."""
    hidden = _read(decoder, cache, feeds, chunk)
    growing = list(zip(combs, (feed.slot for feed in feeds), strict=True))
    while growing:
        grow([comb for comb, _ in growing], decoder.logits(hidden), context)
        growing = [(comb, slot) for comb, slot in growing if comb.wants]
        if growing:
            tokens, slots, positions = zip(
                *((comb.chain[-1], slot, comb.request.length - 1 + len(comb.chain)) for comb, slot in growing),
                strict=True,
            )
            hidden = decoder.hidden(np.array(tokens), np.array(slots), np.array(positions), cache).hidden


def _read(decoder: Decoder, cache: KVCache, feeds: Sequence[Feed], chunk: int) -> Float[Tensor, "feeds hidden"]:
    """The hidden state at each feed's last token."""
    lengths = np.array([len(feed.tokens) for feed in feeds])
    tokens = np.array([token for feed in feeds for token in feed.tokens], np.int64)
    slots = np.repeat(np.array([feed.slot for feed in feeds], np.int64), lengths)
    positions = np.concatenate([np.arange(feed.start, feed.start + len(feed.tokens)) for feed in feeds])
    parts = [slice(start, start + chunk) for start in range(0, len(tokens), chunk)]
    passes = [decoder.hidden(tokens[part], slots[part], positions[part], cache).hidden for part in parts]
    return torch.cat(passes)[torch.from_numpy(np.cumsum(lengths) - 1)]


def _laws(logits: Float[Tensor, "R V"], sampling: Sampling) -> Float64[np.ndarray, "R V"]:
    """`process` of every row; all at once where only a temperature shapes them."""
    rows = logits.double()
    if sampling.temperature > 0 and not truncates(sampling):
        return torch.softmax(rows / sampling.temperature, dim=1).cpu().numpy()
    return np.stack([process(row, sampling).p for row in rows.cpu().numpy()])


def _among(
    logits: Float64[np.ndarray, "m"],
    token: Int64[np.ndarray, "m"],
    key: UInt64[np.ndarray, "1"],
    first: int,
    context: DraftContext,
) -> Arrivals:
    """A race of the most probable only: in `matching` any candidates will do, and later ones hardly ever come first."""
    p = np.zeros(int(token.max()) + 1)
    p[token] = process(logits, context.sampling).p
    return Arrivals(race(p, key, first))
