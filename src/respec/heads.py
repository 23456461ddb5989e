"""The heads of the `eagle` drafter over a run: the one that drafts, the last one that did well, and what came to the door last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from respec.errors import ModelError
from respec.models.eagle import EagleHead
from respec.models.eagle_check import EMBEDDING, HeadFacts, unlike, unsound
from respec.models.eagle_decoder import EagleDecoder
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.draft.eagle_probe import Kept, answers, draft_with, kept, what_is_wrong


@dataclass(frozen=True)
class Known:
    """A head that drafts or did. `weights` are its own, without the embedding, where they are remembered; none of the head that the run began with."""

    kept: Kept
    weights: Mapping[str, Tensor] | None = None

    @property
    def version(self) -> int:
        return self.kept.version


class Heads:
    """Keeps one snapshot beside the one that drafts, to come back to. `first` reads the head that the drafter began with.

    With `remembers` the weights of both are kept as well, so that a run that goes on from a checkpoint drafts with the same head.
    """

    def __init__(self, drafter: EagleDrafter, first: Callable[[], EagleHead] | None, remembers: bool) -> None:
        self.drafter, self.now = drafter, Known(kept(drafter))
        self._first, self._remembers = first, remembers
        self._good: Known | None = None
        # of the last head that came to the door sound
        self._offered: HeadFacts | None = None

    def refusal(self, facts: HeadFacts, version: int, trusted: bool) -> str:
        """What is wrong with a head that comes to the door, and why most likely; empty for nothing."""
        if version <= self.drafter.version:
            return f"the drafter is at version {self.drafter.version}; likely cause: a stale copy, or one that was sent twice"
        held = (self._good or self.now).kept.snapshot.facts
        fault = unsound(facts, held)
        if fault is None:
            offered, self._offered = self._offered or held, facts
            fault = None if trusted else unlike(facts, held, offered)
        return f"{fault.seen}; likely cause: {fault.cause}" if fault else ""

    def take(self, head: EagleHead, version: int, learned_from: int, facts: HeadFacts, did_well: bool) -> None:
        """`head` drafts from now on; `did_well` says whether the one before it is to come back to."""
        if did_well:
            self._good = self.now
        self.drafter.adopt(head, version, learned_from, facts)
        self.now = Known(kept(self.drafter), _weights(head) if self._remembers else None)

    def last_good(self) -> Known | None:
        """What is to come back; none where there is nothing better than what drafts."""
        if self._good is not None or self._first is None:
            return self._good
        try:
            snapshot = EagleDecoder(self._first(), self.drafter.snapshot.shape.dtype, self.drafter.snapshot)
        except (ModelError, OSError):
            # speed alone is at stake
            return None
        first = Kept(snapshot, 0, 0, answers(snapshot))
        # where it is what has just failed, it would only fail again
        return Known(first) if what_is_wrong(self.drafter.snapshot, first.answered) else None

    def restore(self, good: Known) -> None:
        """It drafts again."""
        draft_with(self.drafter, good.kept)
        self.now = self._good = good

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: which head drafts and which did well, with their weights, and the size of what was offered last."""
        state: dict[str, Any] = {"now": _state(self.now)}
        if self._good is not None:
            # a tensor is written once
            state["good"] = {"same": 1} if self._good is self.now else _state(self._good)
        if self._offered is not None:
            state["offered"] = dict(self._offered.norm)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state: the same heads draft and come back."""
        begun, good = self.now, state.get("good", {})
        # one head for both, so that they share an embedding
        head = self._first() if self._first is not None and "weights" in {**state["now"], **good} else None
        self.now = self._read(state["now"], head, begun)
        if good:
            self._good = self.now if "same" in good else self._read(good, head, begun)
        if "offered" in state:
            self._offered = replace(self.now.kept.snapshot.facts, norm=dict(state["offered"]))
        draft_with(self.drafter, self.now.kept)

    def _read(self, state: Mapping[str, Any], head: EagleHead | None, begun: Known) -> Known:
        """The head of a saved state, by way of `head`; `begun` where it is the one that the run began with."""
        if "weights" not in state:
            return begun
        assert head is not None, "weights are read into the head that the run began with"
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if name != EMBEDDING:
                    parameter.copy_(state["weights"][name])
        snapshot = EagleDecoder(head, self.drafter.snapshot.shape.dtype, self.now.kept.snapshot)
        made = Kept(snapshot, int(state["version"]), int(state["learned_from"]), answers(snapshot))
        return Known(made, _weights(head))


def _state(head: Known) -> dict[str, Any]:
    kept = {"version": head.kept.version, "learned_from": head.kept.learned_from}
    return kept if head.weights is None else kept | {"weights": dict(head.weights)}


def _weights(head: EagleHead) -> dict[str, Float[Tensor, "..."]]:
    return {name: p.detach().clone() for name, p in head.named_parameters() if name != EMBEDDING}
