"""Questions to a snapshot of an EAGLE-3 head that has begun to draft badly: what is wrong with it, as far as it can say itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.models.eagle_decoder import EagleDecoder
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.kv_cache import KVCache

ASKED = 8
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
