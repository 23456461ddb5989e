"""The EAGLE-3 drafter (Li et al. 2025, arXiv 2503.01840): a head on the target's hidden states drafts token by token.

It keeps one layer of keys and values for each request. What it missed it makes up for in one pass over (hidden state at i, token i + 1); then
it goes on from its own features, whose keys the next such pass writes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.errors import ModelError, StaleError
from respec.models.decoder import DecodeShape
from respec.models.eagle import EagleHead
from respec.models.eagle_check import HeadFacts
from respec.models.eagle_decoder import EagleDecoder
from respec.rollout.draft.candidates import candidates
from respec.rollout.draft.comb import Arrivals, Comb, lane, widths
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import token_key
from respec.rollout.request import Request
from respec.rollout.tree import NOTHING, DraftTree
from respec.types import Plan, Proposer, Rollout


@dataclass
class _Progress:
    """How far one request has come: positions extended over, by which snapshot, and the target's hidden states at those after, up to
    `observed`."""

    extended: int = 0
    observed: int = 0
    maker: EagleDecoder | None = None
    waiting: list[Float[Tensor, "T taps*hidden"]] = field(default_factory=list)


class EagleDrafter:
    """Drafts with a snapshot of a head in `dtype`; `adopt` takes a newer one. `version` is the drafter's update counter, `learned_from` that of
    the policy whose laws it learned last. With `keeps` every snapshot has its weights by name as well.
    """

    name = "eagle"

    def __init__(self, head: EagleHead, dtype: torch.dtype, version: int = 0, keeps: bool = False) -> None:
        self.version, self.learned_from = version, 0
        self._decoder = EagleDecoder(head, dtype, keeps=keeps)
        self._cache: KVCache | None = None
        self._progress: dict[int, _Progress] = {}

    @property
    def kv_shape(self) -> DecodeShape:
        return self._decoder.shape

    @property
    def taps(self) -> tuple[int, ...]:
        return self._decoder.taps

    def adopt(self, head: EagleHead, version: int, learned_from: int = 0, facts: HeadFacts | None = None) -> None:
        """Takes a newer head, between two decode rounds; all that the old one computed is forgotten. The head may go on learning. `facts` are
        its own, where they are known.

        Raises StaleError for a version that is not newer, ModelError for a head that reads other layers.
        """
        if version <= self.version:
            raise StaleError(f"the drafter is at version {self.version}; version {version} is not newer")
        if head.shape.taps != self.taps:
            raise ModelError(
                f"the new head reads layers {head.shape.taps}, the one in use {self.taps}; they must agree"
            )
        self.restore(EagleDecoder(head, self._decoder.shape.dtype, self._decoder, facts))
        self.version, self.learned_from = version, learned_from

    @property
    def snapshot(self) -> EagleDecoder:
        """What drafts now."""
        return self._decoder

    def restore(self, snapshot: EagleDecoder) -> None:
        """Drafts with this snapshot, of this drafter's earlier heads or of its next; all that the one before computed is forgotten."""
        self._decoder = snapshot
        self._cache = None
        self.drop()

    def stale(self) -> int:
        """Of how many requests the keys were made by another snapshot than the one that drafts: law 4 has it that there are none."""
        made = [progress.maker for progress in self._progress.values() if progress.extended]
        return sum(maker is not self._decoder for maker in made)

    def waiting(self) -> list[Float[Tensor, "T taps*hidden"]]:
        """The target's hidden states that came since the last draft."""
        return [part for progress in self._progress.values() for part in progress.waiting]

    def observed(self, request: Request) -> int:
        progress = self._progress.get(id(request))
        return progress.observed if progress else 0

    def observe(self, request: Request, start: int, taps: Float[Tensor, "T taps*hidden"]) -> None:
        """Raises ModelError when the hidden states are not of the width that the head was made for."""
        progress = self._progress.get(id(request))
        if progress is None:
            width = len(self.taps) * self._decoder.hidden
            if taps.shape[1] != width:
                raise ModelError(
                    f"the drafter was made for hidden states of width {width} in all, the policy's are {taps.shape[1]} wide: "
                    "it belongs to another model"
                )
            progress = self._progress[id(request)] = _Progress()
        progress.waiting.append(taps)
        progress.observed += len(taps)

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        cache = self._cache_like(context.cache)
        combs = {
            index: Comb(request, widths(plan, limit))
            for index, (request, limit) in enumerate(zip(requests, limits, strict=True))
            # a prompt of one token has no hidden state before its pending token
            if limit > 0 and request.length > 1 and self.observed(request) == request.length - 1
        }
        if combs:
            self._draft(list(combs.values()), cache, context)
        return [combs[i].tree(Proposer.EAGLE) if i in combs else NOTHING for i in range(len(requests))]

    def finish(self, request: Request) -> None:
        self._progress.pop(id(request), None)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: a head learns by its weights, which come through `adopt`."""

    def drop(self) -> None:
        self._progress.clear()

    def _cache_like(self, target: KVCache) -> KVCache:
        """A cache with the target's slots and room; a request's slot is the same in both."""
        if self._cache is None or self._cache.slots < target.slots or self._cache.capacity < target.capacity:
            self._drop_extended()
            self._cache = KVCache(self._decoder.shape, target.slots, target.capacity)
        return self._cache

    def _drop_extended(self) -> None:
        """Forgets the requests that have keys in the cache, which is about to go."""
        self._progress = {key: progress for key, progress in self._progress.items() if not progress.extended}

    def _draft(self, combs: list[Comb], cache: KVCache, context: DraftContext) -> None:
        """Grows all combs together, depth by depth."""
        requests = [comb.request for comb in combs]
        feature, logits = self._extend(requests, cache)
        alive = np.arange(len(combs))
        slot = np.array([request.slot for request in requests], np.int64)
        position = np.array([request.length - 2 for request in requests], np.int64)
        deepest = max(len(comb.width_D) for comb in combs)
        # the keys of every depth at once: a key is small, a call is not
        places = np.array([len(request.tokens) for request in requests])[:, None] + np.arange(deepest)
        sequence = np.concatenate([request.key for request in requests])[:, None]
        key = token_key(np.broadcast_to(sequence, places.shape), places, lane(context))
        for depth in range(1, deepest + 1):
            first = [combs[row].width_D[depth - 1] for row in alive]
            found = candidates(
                logits, self._decoder.draft_token, self._decoder.shape.vocabulary, key[alive, depth - 1], first, context
            )
            _hang([combs[row] for row in alive], found, depth, context)
            stays = np.array([combs[row].wants for row in alive])
            if not stays.any():
                break
            alive = alive[stays]
            if not stays.all():
                feature = feature[torch.from_numpy(stays)]
            token = np.array([combs[row].chain[-1] for row in alive], np.int64)
            feature, logits = self._decoder.step(feature, token, slot[alive], position[alive] + depth, cache)

    def _extend(self, requests: Sequence[Request], cache: KVCache) -> tuple[Tensor, Tensor]:
        """One pass over all that is waiting; feature and logits after each request's last pair."""
        taps, tokens, slots, positions, counts = [], list[int](), list[int](), list[int](), list[int]()
        for request in requests:
            progress = self._progress[id(request)]
            start, end = progress.extended, request.length - 1
            known = request.known
            taps += progress.waiting
            tokens += known[start + 1 : end + 1]
            slots += [request.slot] * (end - start)
            positions += range(start, end)
            counts.append(end - start)
            progress.maker = progress.maker or self._decoder
            progress.extended = progress.observed = end
            progress.waiting = []
        feature = self._decoder.fuse(torch.cat(taps).to(self._decoder.shape.dtype))
        token, slot, position = (np.array(part, np.int64) for part in (tokens, slots, positions))
        return self._decoder.step(feature, token, slot, position, cache, np.cumsum(counts) - 1)


def _hang(combs: Sequence[Comb], found: Sequence[Arrivals], depth: int, context: DraftContext) -> None:
    """Puts what arrived on the combs, but for what is not worth a row."""
    if context.cut is None:
        for comb, arrivals in zip(combs, found, strict=True):
            comb.add(arrivals)
        return
    chance = context.cut.chance(EagleDrafter.name, depth, np.array([arrivals.lead for arrivals in found]))
    for comb, arrivals, stands in zip(combs, found, chance.tolist(), strict=True):
        comb.sift(arrivals, stands, context.cut.floor)
