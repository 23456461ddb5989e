"""A drafter's accepted tokens after a swap of weights, held against what they were before it: a sequential test for collapse.

Page's cumulative sum (1954) of the log-likelihood ratio of "acceptance has collapsed" over "acceptance is as it was, or somewhat lower":

    S <- max(0, S + (1/φ) [x log(p1 / p0) + (n - x) log((1 - p1) / (1 - p0))]),   alarm at S >= log(ODDS · depths)

over the rounds since the swap, one sum for each drafted depth: x of the n sequences whose draft stood up to there accepted it. With a the
acceptance before the swap less two of its standard errors, p0 = TOLERATED·a is the worst that a clean swap does and p1 = COLLAPSED·a a
collapse. A draft that is missing where there was room for one counts as refused at depth 1.

Level. E[exp(step)] <= 1 for every acceptance from p0 up, since p1 < p0 makes it fall in p. So, by Lorden (1971), the mean number of rounds
between false alarms is at least ODDS = 10,000 were every swap as bad as is tolerated; with k depths, each at ODDS · k, as well. Without any fall
it is far more: for a = 0.7,
0.7·(1/2)^θ + 0.3·(0.72/0.44)^θ = 1 at θ = 2.2, so that an excursion ends in an alarm with probability below ODDS^-2.2 = 2e-9.

Power. With a = 0.7 a sequence whose acceptance has gone to 0.05 adds 0.43 in the mean, so some 25 sequences raise the alarm, times φ; one whose
acceptance is halved adds 0.08, so 130 do.

φ is the overdispersion. Sequences of a group are alike and steps differ in their prompts, so counts spread wider than a binomial's; n of them
count as n/φ. It is measured on clean rounds, one by one and summed over a swap, the larger counting, within 1..4.

Acceptance also depends on how far completions have come and how they are sampled. So the estimate is kept by `key`, and shrunk towards
the one over all keys of the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from jaxtyping import Float64

TOLERATED, COLLAPSED = 0.8, 0.4
ODDS = 1e4
# What was seen counts so much less at each swap, and after a drafter has failed twice: an estimate that is wrong is to go.
KEEP, DOUBTED = 0.7, 0.3
# Sequences: weight of the estimate over all keys, and the least evidence there must be in all.
SHRINK, EVIDENCE = 16.0, 64.0
LEAST = 0.05
# φ before anything was seen, for how many rounds and swaps that stands, and the bounds.
PHI, PHI_ROUNDS, PHI_SWAPS, PHI_BOUNDS = 1.5, 20.0, 4.0, (1.0, 4.0)

# A key that can be written down: branching, kind of sampling, how far completions have come.
Numbers = tuple[int, tuple[float, ...], int]


@dataclass(frozen=True)
class Sighting:
    """What raised an alarm: in so many rounds `accepted` of `tested` drafted tokens of this depth, of which `expected` should have been."""

    depth: int
    accepted: int
    tested: int
    expected: float
    rounds: int


@dataclass
class _Counts:
    """Sequences by depth: those whose draft stood up to there, and those of them that accepted it."""

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def reach(self, depth: int) -> None:
        missing = [0.0] * (depth - len(self.tested))
        self.tested += missing
        self.accepted += missing

    def add(self, other: _Counts) -> None:
        self.reach(len(other.tested))
        for d, (tested, accepted) in enumerate(zip(other.tested, other.accepted, strict=True)):
            self.tested[d] += tested
            self.accepted[d] += accepted

    def fade(self, keep: float) -> None:
        self.tested = [keep * count for count in self.tested]
        self.accepted = [keep * count for count in self.accepted]


@dataclass(frozen=True)
class _Expected:
    """Of one depth: the acceptance before the swap, and what an accepted and a refused token add to the sum; nothing where too little is
    known, or expected."""

    a: float
    gain: float
    loss: float


NOTHING = _Expected(0.0, 0.0, 0.0)


@dataclass
class _Sum:
    """Of one depth: the sum, and since it was last nought the rounds, accepted, tested and expected sequences."""

    score: float = 0.0
    rounds: int = 0
    accepted: int = 0
    tested: int = 0
    expected: float = 0.0


class Watch:
    """Watches one drafter. A `key` is (plan's branching, kind of sampling, how far completions have come), the last being what is shrunk over.

    A round costs a few additions a depth: what is expected changes with a swap, and is worked out once a swap and key.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[Hashable, ...], _Counts] = {}
        # Σ squares and count of standardized residuals, by round and by swap
        self._by_round = [PHI * PHI_ROUNDS, PHI_ROUNDS]
        self._by_swap = [PHI * PHI_SWAPS, PHI_SWAPS]
        self.again()

    @property
    def phi(self) -> float:
        """The overdispersion that the test allows for."""
        least, most = PHI_BOUNDS
        return min(max(least, *(squares / count for squares, count in (self._by_round, self._by_swap))), most)

    def swapped(self) -> None:
        """Weights have changed, and those before did well: what they did is what is expected now."""
        if not self._since:
            return
        self._learn_spread()
        for counts in self._before.values():
            counts.fade(KEEP)
        for key, counts in self._since.items():
            self._before.setdefault(key, _Counts()).add(counts)
        self.again()

    def again(self) -> None:
        """Begins anew with the estimate as it is: what was seen since the swap is not believed."""
        self._since: dict[tuple[Hashable, ...], _Counts] = {}
        self._expected: dict[tuple[Hashable, ...], list[_Expected]] = {}
        self._sums: list[_Sum] = []
        # of the rounds since the swap: Σ of squares, rounds; Σ residual, variance, sequences
        self._squares, self._rounds = 0.0, 0
        self._residual = self._variance = self._sequences = 0.0

    def doubt(self) -> None:
        """Drafts that should be as good as before are not: the estimate counts less, and goes in the end."""
        for counts in self._before.values():
            counts.fade(DOUBTED)
        self.again()

    def expected(self, branching: int) -> tuple[list[float], list[float]]:
        """Tested and accepted sequences by depth behind the estimate, for plans of this branching; empty where they are too few to judge by."""
        pooled = self._pooled((branching,))
        return (pooled.tested, pooled.accepted) if pooled.tested and pooled.tested[0] >= EVIDENCE else ([], [])

    def state(self) -> dict[str, Float64[np.ndarray, "..."]]:
        """All that it knows, for keys of numbers: a row for each depth of each key's counts, for each sum, and the spread."""
        counts = list[tuple[float, ...]]()
        for since, known in enumerate((self._before, self._since)):
            for key, kept in known.items():
                branching, kind, age = cast(Numbers, key)
                counts += [(since, branching, *kind, age, *row) for row in zip(kept.tested, kept.accepted, strict=True)]
        sums = [(s.score, s.rounds, s.accepted, s.tested, s.expected) for s in self._sums]
        spread = (*self._by_round, *self._by_swap, self._squares, self._rounds, self._residual, self._variance)
        return {
            "counts": np.array(counts, np.float64), "sums": np.array(sums, np.float64).reshape(-1, 5),
            "spread": np.array((*spread, self._sequences), np.float64),
        }  # fmt: skip

    def load(self, state: Mapping[str, Float64[np.ndarray, "..."]]) -> None:
        """Takes up what `state` gave; what is seen from there on is judged as it would have been."""
        self._before.clear()
        self.again()
        for since, branching, *kind, age, tested, accepted in state["counts"].tolist():
            known = self._since if since else self._before
            counts = known.setdefault((int(branching), tuple(kind), int(age)), _Counts())
            counts.tested.append(tested)
            counts.accepted.append(accepted)
        *spread, self._squares, self._rounds, self._residual, self._variance, self._sequences = state["spread"].tolist()
        self._by_round, self._by_swap = spread[:2], spread[2:]
        self._expected = {key: self._expect(key) for key in self._since}
        self._sums = [
            _Sum(score, int(rounds), int(accepted), int(tested), expected)
            for score, rounds, accepted, tested, expected in state["sums"].tolist()
        ]

    def observe(
        self, key: tuple[Hashable, ...], asked: int, tested_D: Sequence[int], accepted_D: Sequence[int]
    ) -> Sighting | None:
        """One round in which `asked` sequences had room for a draft; what raises the alarm, if it does."""
        depth = len(tested_D) or 1
        since = self._since.get(key)
        if since is None:
            since = self._since[key] = _Counts()
            self._expected[key] = self._expect(key)
        if len(since.tested) < depth:
            since.reach(depth)
        expected, worst, depths = self._expected[key], 0, 0
        while len(self._sums) < min(depth, len(expected)):
            self._sums.append(_Sum())
        for d in range(depth):
            n, x = tested_D[d] if d else asked, accepted_D[d] if d < len(accepted_D) else 0
            since.tested[d] += n
            since.accepted[d] += x
            depths += n > 0
            if asked and d < len(expected):
                self._add(self._sums[d], expected[d], n, x)
                if self._sums[d].score > self._sums[worst].score:
                    worst = d
        if not (asked and expected):
            return None
        self._spread(expected[0].a, asked, accepted_D[0] if accepted_D else 0)
        found = self._sums[worst]
        if found.score < math.log(ODDS * max(1, depths)):
            return None
        return Sighting(worst + 1, found.accepted, found.tested, found.expected, found.rounds)

    def _add(self, total: _Sum, expected: _Expected, n: int, x: int) -> None:
        total.score += x * expected.gain + (n - x) * expected.loss
        if total.score <= 0:
            total.score, total.rounds, total.accepted, total.tested, total.expected = 0.0, 0, 0, 0, 0.0
            return
        total.rounds += 1
        total.accepted += x
        total.tested += n
        total.expected += n * expected.a

    def _spread(self, a: float, asked: int, accepted: int) -> None:
        residual, variance = accepted - asked * a, max(asked * a * (1 - a), 1e-3)
        self._squares += min(residual * residual / variance, 9.0)
        self._rounds += 1
        self._residual += residual
        self._variance += variance
        self._sequences += asked

    def _learn_spread(self) -> None:
        """The spread of the rounds since the swap, which were clean, about what was expected of them."""
        if not self._variance:
            return
        # the expectation is an estimate, too, and all these rounds were held against the same one
        known = sum(counts.tested[0] for counts in self._before.values())
        square = self._residual**2 / (self._variance * (1.0 + self._sequences / known))
        self._by_round = [KEEP * self._by_round[0] + self._squares, KEEP * self._by_round[1] + self._rounds]
        self._by_swap = [KEEP * self._by_swap[0] + min(square, 9.0), KEEP * self._by_swap[1] + 1.0]

    def _expect(self, key: tuple[Hashable, ...]) -> list[_Expected]:
        """By depth; empty where too little is known in all."""
        pooled, known = self._pooled(key[:-1]), self._before.get(key, _Counts())
        if not pooled.tested or pooled.tested[0] < EVIDENCE:
            return []
        known.reach(len(pooled.tested))
        phi = self.phi
        return [
            _expected(*counts, phi)
            for counts in zip(known.tested, known.accepted, pooled.tested, pooled.accepted, strict=True)
        ]

    def _pooled(self, kind: tuple[Hashable, ...]) -> _Counts:
        total = _Counts()
        for key, counts in self._before.items():
            if key[: len(kind)] == kind:
                total.add(counts)
        return total


def _expected(tested: float, accepted: float, tested_all: float, accepted_all: float, phi: float) -> _Expected:
    """The log-likelihood ratios of an accepted and a refused token at one depth; see the top."""
    if tested_all < SHRINK:
        return NOTHING
    weight = tested + SHRINK
    a = min((accepted + SHRINK * accepted_all / tested_all) / weight, 1.0)
    p = min(a - 2 * math.sqrt(phi * a * (1 - a) / weight), 0.98)
    if p <= LEAST:
        return _Expected(a, 0.0, 0.0)
    p0, p1 = TOLERATED * p, COLLAPSED * p
    return _Expected(a, math.log(p1 / p0) / phi, math.log((1 - p1) / (1 - p0)) / phi)


def asked(remaining_B: Sequence[int], depth_B: Sequence[int] | None) -> int:
    """How many sequences had room for a draft."""
    if depth_B is not None:
        return sum(left > 1 and deep > 0 for left, deep in zip(remaining_B, depth_B, strict=False))
    return len(remaining_B) if min(remaining_B, default=0) > 1 else sum(left > 1 for left in remaining_B)
