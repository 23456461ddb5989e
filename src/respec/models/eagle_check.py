"""What can be said of an EAGLE-3 head's weights without drafting with them: held against the head before it, at the door.

Weights that go wrong between a trainer and what serves them are the most common complaint about speculation in training: the drafts are
still verified, so nothing fails, and all that is seen is that it became slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from respec.models.eagle import EagleHead

EMBEDDING = "embed_tokens.weight"
# An update moves a tensor's norm by a few hundredths.
FAR = 3.0
# Blocks of one fusion layer and of the next update's are nearly parallel, blocks of different taps nearly orthogonal.
ALIKE = 0.5


@dataclass(frozen=True)
class HeadFacts:
    """What the next head is held against. Made by `facts_of`; a snapshot carries that of its head.

    `norm` by tensor, the embedding's left out: it does not learn, and is most of the head. `fusion` is the layer that fuses the taps, in bfloat16;
    `marked` the tokens that the head's other map says can be drafted.
    """

    vocabulary: int
    taps: tuple[int, ...]
    size: Mapping[str, tuple[int, ...]]
    norm: Mapping[str, float]
    draft_token: Int64[np.ndarray, "draft"]
    marked: Bool[np.ndarray, "V"] | None
    fusion: Float[Tensor, "hidden taps*hidden"]


@dataclass(frozen=True)
class Fault:
    """What was seen, and what most likely did it, for a person."""

    seen: str
    cause: str


@torch.no_grad()
def facts_of(head: EagleHead) -> HeadFacts:
    """One pass over the weights that learn."""
    weights = dict(head.named_parameters())
    return HeadFacts(
        head.shape.layer.vocab_size,
        head.shape.taps,
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        {
            name: float(torch.linalg.vector_norm(tensor.float()))
            for name, tensor in weights.items()
            if name != EMBEDDING
        },
        head.draft_token.cpu().numpy().copy(),
        None if head.t2d is None else head.t2d.cpu().numpy().copy(),
        head.fc.weight.to(torch.bfloat16, copy=True),
    )


def unsound(new: HeadFacts, held: HeadFacts) -> Fault | None:
    """The first thing that no head may have which takes the place of `held`, however much it has learned; None for nothing."""
    return _another_size(new, held) or _broken(new) or _wrong_map(new, held)


def unlike(new: HeadFacts, held: HeadFacts, offered: HeadFacts) -> Fault | None:
    """The first thing that no single update does to a sound head: `offered` is the one before it, whether or not it was taken."""
    return _far(new, offered) or _reordered(new, held)


def _another_size(new: HeadFacts, last: HeadFacts) -> Fault | None:
    if new.taps != last.taps:
        return Fault(
            f"it reads layers {new.taps}, the one in use {last.taps}", "a head that was made for another model or depth"
        )
    differ = [name for name in last.size if new.size.get(name) != last.size[name]]
    if not differ and new.vocabulary == last.vocabulary:
        return None
    name = differ[0] if differ else "the vocabulary"
    sizes = (new.size.get(name), last.size[name]) if differ else (new.vocabulary, last.vocabulary)
    return Fault(f"{name} has size {sizes[0]}, it was {sizes[1]}", "a head that was made for another model")


def _broken(new: HeadFacts) -> Fault | None:
    odd = [name for name, norm in new.norm.items() if not math.isfinite(norm)]
    if odd:
        return Fault(
            f"{len(odd)} of its tensors are not finite (first: {odd[0]})", "an update that diverged; lower drafter.lr"
        )
    empty = [name for name, norm in new.norm.items() if norm == 0.0]
    if empty:
        return Fault(
            f"{len(empty)} of its tensors are all zero (first: {empty[0]})", "weights that were never copied or loaded"
        )
    return None


def _wrong_map(new: HeadFacts, last: HeadFacts) -> Fault | None:
    token = new.draft_token
    if token.min() < 0 or token.max() >= new.vocabulary:
        seen = f"its vocabulary map points to tokens {token.min()}..{token.max()} of {new.vocabulary}"
    elif len(np.unique(token)) < len(token):
        seen = f"its vocabulary map sends {len(token)} draft tokens to {len(np.unique(token))} tokens"
    elif new.marked is not None and not np.array_equal(np.flatnonzero(new.marked), np.sort(token)):
        seen = "its two vocabulary maps (d2t, t2d) contradict each other"
    elif not np.array_equal(token, last.draft_token):
        seen = f"its vocabulary map differs at {int((token != last.draft_token).sum())} of {len(token)} draft tokens"
    else:
        return None
    return Fault(seen, "a map that was rebuilt or overwritten; a head keeps the map that it was trained with")


def _far(new: HeadFacts, last: HeadFacts) -> Fault | None:
    for name, norm in new.norm.items():
        before = last.norm[name]
        ratio = norm / before if before else 1.0
        if not 1 / FAR < ratio < FAR:
            return Fault(
                f"{name} has {ratio:.2g} times the norm it had", "an update that diverged, or weights of another head"
            )
    return None


def _reordered(new: HeadFacts, last: HeadFacts) -> Fault | None:
    blocks = [
        torch.stack([block.flatten().float() for block in facts.fusion.chunk(len(facts.taps), dim=1)])
        for facts in (new, last)
    ]
    ours, before = (torch.nn.functional.normalize(block) for block in blocks)
    alike, place = (ours @ before.T).max(dim=1)
    if place.tolist() == list(range(len(new.taps))) or float(alike.min()) < ALIKE:
        return None
    return Fault(
        f"its fusion layer has the blocks of layers {new.taps} in the order {place.tolist()}",
        "hidden states put side by side in another order when it was trained or loaded",
    )
