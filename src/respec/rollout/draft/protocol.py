"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from respec.rollout.request import Request
from respec.types import Plan, Proposer


class Drafter(Protocol):
    """Proposes continuations. Reads only tokens, so it may start late, be dropped at any time, and be rebuilt from the tokens.

    A draft changes how fast tokens come, never which: the engine verifies every one.
    """

    proposer: Proposer

    def propose(self, requests: Sequence[Request], plan: Plan, limits: Sequence[int]) -> list[list[int]]:
        """For each request a chain of at most min(plan.s, its limit) tokens that may follow what it holds; it may be empty."""
        ...

    def finish(self, request: Request) -> None:
        """The request has ended; its tokens are final."""
        ...

    def learn(self, row: int, completions: Iterable[Int32[np.ndarray, "T"]]) -> None:
        """Finished completions of a dataset row, for its later epochs; in canonical order, after a rollout."""
        ...

    def drop(self) -> None:
        """Forgets the state of all requests in the making, not what was learned from finished ones."""
        ...
