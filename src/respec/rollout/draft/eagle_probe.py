"""Questions to a snapshot of an EAGLE-3 head that has begun to draft badly: what is wrong with it, as far as it can say itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.models.eagle_decoder import EagleDecoder
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.kv_cache import KVCache

ASKED = 8
LOOKS, SHARE = (1, 8), 0.005
# Hidden states grow from layer to layer, severalfold over a few; an update of the policy moves their size by a few hundredths.
OTHER = 3.0


@dataclass(frozen=True)
class Kept:
    """A snapshot of a head that drafted well, the head's version, that of the policy that it learned from, and its answers."""

    snapshot: EagleDecoder
    version: int
    learned_from: int
    answered: Float[Tensor, "asked draft"]


def kept(drafter: EagleDrafter) -> Kept:
    """What drafts now."""
    return Kept(drafter.snapshot, drafter.version, drafter.learned_from, answers(drafter.snapshot))


def draft_with(drafter: EagleDrafter, head: Kept) -> None:
    """The drafter drafts with this snapshot, and says so."""
    drafter.restore(head.snapshot)
    drafter.version, drafter.learned_from = head.version, head.learned_from


def answers(decoder: EagleDecoder) -> Float[Tensor, "asked draft"]:
    """Its logits along a short made-up sequence: the same to the bit for as long as nothing has touched it."""
    generator = torch.Generator().manual_seed(ASKED)
    taps = torch.randn(ASKED, len(decoder.taps) * decoder.hidden, generator=generator).to(decoder.shape.device)
    place = np.arange(ASKED, dtype=np.int64)
    cache = KVCache(decoder.shape, 1, ASKED)
    feature = decoder.fuse(taps.to(decoder.shape.dtype))
    return decoder.step(feature, place % decoder.shape.vocabulary, np.zeros_like(place), place, cache)[1]


def what_is_wrong(decoder: EagleDecoder, answered: Float[Tensor, "asked draft"]) -> str:
    """What has befallen a snapshot since it gave these answers; empty when it is as it was."""
    if not decoder.rotates_right():
        return "its rotary cache is not that of its positions"
    if not np.array_equal(decoder.draft_token, decoder.facts.draft_token):
        return "its vocabulary map is not the one that it came with"
    now = answers(decoder)
    if not now.isfinite().all():
        return "its logits are not finite"
    if not torch.equal(now, answered):
        return "its packed weights are not those that were adopted"
    return ""


def sizes(waiting: Sequence[Float[Tensor, "T taps*hidden"]], taps: int) -> Float[np.ndarray, "taps"]:
    """The median norm of the target's hidden states at each tapped layer: a few tokens of enormous norm are common."""
    rows = torch.cat(list(waiting)).float()
    return rows.unflatten(1, (taps, -1)).norm(dim=2).median(dim=0).values.cpu().numpy()


def another_size(now: Float[np.ndarray, "taps"], before: Float[np.ndarray, "taps"], taps: tuple[int, ...]) -> str:
    """What is said where hidden states have other sizes than they had before a swap; empty where they are alike."""
    ratio = now / np.maximum(before, 1e-9)
    if ((ratio < OTHER) & (ratio > 1 / OTHER)).all():
        return ""
    seen, had = (", ".join(f"{size:.3g}" for size in part) for part in (now, before))
    return f"hidden states before layers {taps} have norms {seen}, they had {had}; likely cause: other layers, or another order, than it reads"


class Inspector:
    """Looks into what a drafter drafts with, and what it reads: `LOOKS` rounds after a head has begun to draft, or later, once looks have taken
    no more than `SHARE` of the seconds of all rounds, `elapsed_s`. A look takes a millisecond, a small model's round no more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._looked_s, self.elapsed_s = clock, 0.0, 0.0
        # the median norms of hidden states, by look
        self._sizes: dict[int, Float[np.ndarray, "taps"]] = {}
        self.began()

    def began(self) -> None:
        """Another head drafts from here on."""
        self._rounds, self._owed = 0, list[int]()

    def round(self) -> bool:
        """The head has drafted for a round; whether there is anything to be looked after."""
        self._rounds += 1
        if self._rounds in LOOKS:
            self._owed.append(self._rounds)
        return self._rounds <= LOOKS[-1] or bool(self._owed)

    def look(self, drafter: EagleDrafter, now: Kept) -> tuple[str, bool]:
        """What is wrong, if a look is owed and paid for, and whether it would be with any head; empty for nothing."""
        if not self._owed or self._looked_s > SHARE * self.elapsed_s:
            return "", False
        began = self._clock()
        found = self._look(drafter, now, self._owed.pop(0))
        self._looked_s += self._clock() - began
        return found

    def _look(self, drafter: EagleDrafter, now: Kept, look: int) -> tuple[str, bool]:
        if wrong := what_is_wrong(drafter.snapshot, now.answered):
            return f"{drafter.name} drafted for {self._rounds} rounds when {wrong}", False
        if not (waiting := drafter.waiting()):
            return "", False
        seen = sizes(waiting, len(drafter.taps))
        wrong = another_size(seen, self._sizes.get(look, seen), drafter.taps)
        if not wrong:
            self._sizes[look] = seen
        return wrong, bool(wrong)
