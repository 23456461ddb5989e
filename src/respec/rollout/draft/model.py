"""The model drafter: a separate small causal LM with the policy's tokenizer, decoding ahead on a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from respec.errors import ModelError
from respec.models.decoder import Decoder, DecodeShape
from respec.rollout.draft.comb import Comb, Feed, by_steps, widths
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.kv_cache import KVCache
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Rollout


def refuse_another_vocabulary(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raises ModelError unless every token means the same to both."""
    ours, theirs = draft.get_vocab(), target.get_vocab()
    if ours == theirs:
        return
    differ = sorted({token for token, index in ours.items() ^ theirs.items()})
    raise ModelError(
        f"the draft model's tokenizer is not the policy's: {len(differ)} tokens differ (first: {differ[0]!r}), of {len(ours)} and "
        f"{len(theirs)}; take a smaller model of the policy's own family"
    )


@dataclass
class _Place:
    """One request on the drafter's cache: the tokens whose keys it holds, the first `certain` of them known to be the request's."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    certain: int = 0


class ModelDrafter:
    """Drafts with `decoder`, whose tokenizer is `draft`. `target` is the policy's, `vocabulary` the width of its logits (which may be
    padded to another than the drafter's).

    What a request has gained since the drafter last saw it is read before the next draft, in passes of `chunk` tokens: so it may
    start at any token. Raises ModelError for tokenizers that differ.
    """

    name = "model"

    def __init__(
        self,
        decoder: Decoder,
        draft: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
        vocabulary: int,
        chunk: int = 256,
    ) -> None:
        refuse_another_vocabulary(draft, target)
        self._decoder = _Widened(decoder, vocabulary)
        self._chunk = chunk
        self._cache: KVCache | None = None
        self._places: dict[int, _Place] = {}

    @property
    def kv_shape(self) -> DecodeShape:
        return self._decoder.shape

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        cache = self._cache_like(context.cache)
        combs = [Comb(request, widths(plan, limit)) for request, limit in zip(requests, limits, strict=True)]
        drafting = [comb for comb in combs if comb.wants]
        if drafting:
            places = [self._catch_up(comb.request, cache) for comb in drafting]
            feeds = [
                Feed(place.slot, place.certain, comb.request.known[place.certain :])
                for comb, place in zip(drafting, places, strict=True)
            ]
            by_steps(self._decoder, cache, drafting, feeds, context, self._chunk)
            for comb, place, feed in zip(drafting, places, feeds, strict=True):
                # the end of the chain was drawn, not read
                place.tokens = [*place.tokens, *feed.tokens, *comb.chain[:-1]]
        return [comb.tree(Proposer.MODEL) for comb in combs]

    def finish(self, request: Request) -> None:
        place = self._places.pop(id(request), None)
        if place is not None and self._cache is not None:
            self._cache.release(place.slot)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: its weights are its own."""

    def drop(self) -> None:
        for place in self._places.values():
            if self._cache is not None:
                self._cache.release(place.slot)
        self._places.clear()

    def _catch_up(self, request: Request, cache: KVCache) -> _Place:
        """The request's place, back at the first token that it lacks; the pending token is always lacking."""
        place = self._places.get(id(request))
        if place is None:
            place = self._places[id(request)] = _Place(cache.allocate(self._decoder.version))
        known = request.known
        end = min(len(place.tokens), len(known) - 1)
        while place.certain < end and place.tokens[place.certain] == known[place.certain]:
            place.certain += 1
        del place.tokens[place.certain :]
        return place

    def _cache_like(self, target: KVCache) -> KVCache:
        """A cache of the drafter's shape with room for what the target's has room for."""
        held = self._cache
        if held is None or held.slots < target.slots or held.capacity < target.capacity:
            self._places.clear()
            self._cache = held = None
            self._cache = held = KVCache(self._decoder.shape, target.slots, target.capacity)
        return held


class _Widened:
    """A decoder whose logits are as wide as the target's: entries that no token has are cut or have no mass."""

    def __init__(self, decoder: Decoder, vocabulary: int) -> None:
        self._decoder = decoder
        self.hidden = decoder.hidden
        self.version = decoder.version
        self.shape = replace(decoder.shape, vocabulary=vocabulary)

    def logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R V"]:
        logits = self._decoder.logits(hidden)
        more = self.shape.vocabulary - logits.shape[1]
        if more > 0:
            return F.pad(logits, (0, more), value=-torch.inf)
        return logits[:, : self.shape.vocabulary]
