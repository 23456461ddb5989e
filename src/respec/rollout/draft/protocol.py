"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from respec.models.decoder import Decoder, DecodeShape
from respec.rollout.kv_cache import KVCache
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Cut, Mode, Plan, Rollout, Sampling


@dataclass(frozen=True)
class DraftContext:
    """What a proposal is made under. In `matching` a drafter that has a distribution races on the target's lane of random numbers; in
    `rejection` it draws on its own, and says from what (`DraftTree.law`).

    `cache` is the target's. A drafter may read it, and write what lies past a request's length: that is never read, and is
    written over by the pass that verifies. With a `cut` a drafter that races for a chain says how each token won, and leaves out what is not worth
    a row; only in `matching`, since it looks at what was drawn.
    """

    sampling: Sampling
    mode: Mode
    cache: KVCache
    cut: Cut | None = None


class Drafter(Protocol):
    """Proposes continuations. Reads only tokens, so it may start late, be dropped at any time, and be rebuilt from the tokens.

    A draft changes how fast tokens come, never which: the engine verifies every one. The exception has a name: in mode `lossy` old answers of
    drafter `previous` are verified leniently.
    """

    name: str

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        """For each request a tree of at most plan.n nodes, no deeper than min(plan.s, its limit); it may be empty."""
        ...

    def finish(self, request: Request) -> None:
        """The request has ended; its tokens are final."""
        ...

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Finished rollouts, for later epochs of their rows; in canonical order, after a rollout."""
        ...

    def drop(self) -> None:
        """Forgets the state of all requests in the making, not what was learned from finished ones."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states: the residual stream before the layers `taps`, side by side."""

    taps: tuple[int, ...]

    def observed(self, request: Request) -> int:
        """For how many of the request's positions, from the first on, it has the hidden states."""
        ...

    def observe(self, request: Request, start: int, taps: Float[Tensor, "T taps*hidden"]) -> None:
        """The target's hidden states at positions start .. start + T - 1; start is `observed(request)`."""
        ...


@runtime_checkable
class Guesser(Drafter, Protocol):
    """A look-up that costs nothing to be asked beside another drafter."""

    def guess(self, requests: Sequence[Request], depth: int, limits: Sequence[int]) -> list[DraftTree]:
        """For each request a chain, with a lead for every token: how sure it is of it, however unsure."""
        ...


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """Keeps keys of its own, of as many sequences of as many tokens as the target's cache."""

    @property
    def kv_shape(self) -> DecodeShape: ...


@runtime_checkable
class PolicyDrafter(Drafter, Protocol):
    """A drafter that decodes with a snapshot made from the policy's own weights, so that it is never stale."""

    def renew(self, decoder: Decoder) -> None:
        """Takes the snapshot that the weight door made for it of the version now decoding."""
        ...
