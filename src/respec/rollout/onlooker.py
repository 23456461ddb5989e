"""What idle look-up drafters would have drafted, seen while others decode: their guess is made, and held against what then comes.

Replaying finished rollouts (`replay`) says what a drafter was worth over whole completions; this says what it is worth here and now, which in
the tail of a rollout, where completions repeat themselves, is another thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from respec.rollout.draft.protocol import Drafter
from respec.rollout.planner import Planner, ShadowPlanner
from respec.rollout.replay import LookUp, Replayed, common, counted
from respec.rollout.request import Request
from respec.types import Plan

# Of the time spent decoding, what looking on may take.
SHARE = 0.005
# Sequences seen before the planner is told.
ENOUGH = 8


@dataclass(frozen=True)
class _Guess:
    """What a drafter would have drafted when the completion had `at` tokens."""

    at: int
    token_n: tuple[int, ...]


class Onlooker:
    """Looks on in one rollout, for a planner that wants to know of idle drafters; for any other it does nothing.

    One guess a drafter and sequence is open at a time; it is settled when the completion has gone that far, or has ended. Where time is short
    a look is left out: guesses are settled later, and those about completions that ended meanwhile are lost.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        planner: Planner,
        share: float = SHARE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share, self._clock = share, clock
        self._planner = planner if isinstance(planner, ShadowPlanner) else None
        self._depth = self._planner.shadow_depth if self._planner else 0
        self._drafters = {name: d for name, d in drafters.items() if isinstance(d, LookUp) and self._depth}
        self._began, self._spent_s = clock(), 0.0
        self._open: dict[str, dict[int, _Guess]] = {name: {} for name in self._drafters}
        self._counts = {name: np.zeros((5, self._depth), np.int64) for name in self._drafters}

    def look(self, active: Sequence[Request], ended: Sequence[Request], busy: str) -> None:
        """After a round: `active` go on, `ended` do not, `busy` is the drafter that drafted, whose worth shows by itself."""
        began = self._clock()
        if not self._planner or not self._drafters or self._spent_s > self._share * (began - self._began):
            return
        for name in self._drafters:
            if name == busy:
                self._open[name].clear()
                continue
            self._settle(name, ended, 1)
            self._settle(name, active, self._depth)
            self._guess(name, active)
            if self._counts[name][0, 0] >= ENOUGH:
                self._planner.shadow(name, Replayed.of(self._counts[name]))
                self._counts[name][:] = 0
        self._spent_s += self._clock() - began

    def _settle(self, name: str, requests: Sequence[Request], grown: int) -> None:
        """Counts the guesses about those that have `grown` tokens more since."""
        guesses = self._open[name]
        for request in requests:
            guess = guesses.get(request.order)
            if guess is not None and len(request.tokens) - guess.at >= grown:
                ahead = request.drawn_from(guess.at)[: self._depth]
                counted(
                    self._counts[name], len(ahead), min(len(guess.token_n), len(ahead)), common(guess.token_n, ahead)
                )
                del guesses[request.order]

    def _guess(self, name: str, active: Sequence[Request]) -> None:
        depth, guesses = self._depth, self._open[name]
        due = [request for request in active if request.order not in guesses]
        trees = self._drafters[name].propose(due, Plan(name, depth, 1, depth), [depth] * len(due), None)
        for request, tree in zip(due, trees, strict=True):
            guesses[request.order] = _Guess(len(request.tokens), tree.token_n)
