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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

TOLERATED, COLLAPSED = 0.8, 0.4
ODDS = 1e4
# What was seen counts so much less at each swap, and after a drafter has failed twice: an estimate that is wrong is to go.
KEEP, DOUBTED = 0.7, 0.3
# Sequences: weight of the estimate over all keys, and the least evidence there must be in all.
SHRINK, EVIDENCE = 16.0, 64.0
LEAST = 0.05
# φ before anything was seen, for how many rounds and swaps that stands, and the bounds.
PHI, PHI_ROUNDS, PHI_SWAPS, PHI_BOUNDS = 1.5, 20.0, 4.0, (1.0, 4.0)


@dataclass(frozen=True)
class Sighting:
    """What raised an alarm: in so many rounds `accepted` of `tested` drafted tokens of this depth, of which `expected` should have been."""

    depth: int
    accepted: int
    tested: int
    expected: float
    rounds: int


class Watch:
    """Watches one drafter. A `key` is (plan's branching, kind of sampling, how far completions have come), the last being what is shrunk over."""

    def __init__(self, depth: int = 64) -> None:
        self._depth = depth
        self._before: dict[tuple[Hashable, ...], Float[np.ndarray, "2 D"]] = {}
        self._since: dict[tuple[Hashable, ...], Float[np.ndarray, "2 D"]] = {}
        # by depth: the sum, and since it was last nought the rounds, accepted, tested and expected sequences
        self._score, self._seen = np.zeros(depth), np.zeros((4, depth))
        # Σ squares and count of standardized residuals, by round and by swap
        self._by_round = np.array([PHI * PHI_ROUNDS, PHI_ROUNDS])
        self._by_swap = np.array([PHI * PHI_SWAPS, PHI_SWAPS])
        # of the rounds since the swap: Σ of squares, rounds; Σ residual, Σ variance, sequences
        self._squares, self._sums = np.zeros(2), np.zeros(3)

    @property
    def phi(self) -> float:
        """The overdispersion that the test allows for."""
        squares, counts = np.array([self._by_round, self._by_swap]).T
        return float(np.clip((squares / counts).max(), *PHI_BOUNDS))

    def swapped(self) -> None:
        """Weights have changed, and those before did well: what they did is what is expected now."""
        if not self._since:
            return
        self._learn_spread()
        for counts in self._before.values():
            counts *= KEEP
        for key, counts in self._since.items():
            self._before[key] = self._before.get(key, 0.0) + counts
        self.again()

    def again(self) -> None:
        """Begins anew with the estimate as it is: what was seen since the swap is not believed."""
        self._since = {}
        self._score, self._seen = np.zeros_like(self._score), np.zeros_like(self._seen)
        self._squares, self._sums = np.zeros(2), np.zeros(3)

    def doubt(self) -> None:
        """Drafts that should be as good as before are not: the estimate counts less, and goes in the end."""
        for counts in self._before.values():
            counts *= DOUBTED
        self.again()

    def expected(self, branching: int) -> tuple[list[float], list[float]]:
        """Tested and accepted sequences by depth behind the estimate, for plans of this branching."""
        tested, accepted = self._pooled((branching,))
        return tested.tolist(), accepted.tolist()

    def observe(
        self, key: tuple[Hashable, ...], asked: int, tested_D: Sequence[int], accepted_D: Sequence[int]
    ) -> Sighting | None:
        """One round in which `asked` sequences had room for a draft; what raises the alarm, if it does."""
        counts = np.zeros((2, self._depth))
        counts[0, 0] = asked
        counts[0, 1 : len(tested_D)] = tested_D[1 : self._depth]
        counts[1, : len(accepted_D)] = accepted_D[: self._depth]
        self._since[key] = self._since.get(key, 0.0) + counts
        known, pooled = self._before.get(key, np.zeros((2, self._depth))), self._pooled(key[:-1])
        if not asked or pooled[0, 0] < EVIDENCE:
            return None
        weight = known[0] + SHRINK
        a = (known[1] + SHRINK * pooled[1] / np.maximum(pooled[0], 1.0)) / weight
        a[pooled[0] < SHRINK] = 0.0
        step = self._step(counts, a, weight)
        mean, variance = asked * a[0], max(asked * a[0] * (1 - a[0]), 1e-3)
        residual = float(counts[1, 0] - mean)
        self._squares += [min(residual**2 / variance, 9.0), 1.0]
        self._sums += [residual, variance, asked]
        self._score = np.maximum(self._score + step, 0.0)
        seen = np.stack([np.ones(self._depth), counts[1], counts[0], counts[0] * a])
        self._seen = np.where(self._score > 0, self._seen + seen, 0.0)
        worst = int(np.argmax(self._score))
        if self._score[worst] < math.log(ODDS * max(1, np.count_nonzero(counts[0]))):
            return None
        rounds, accepted, tested, expected = self._seen[:, worst].tolist()
        return Sighting(worst + 1, int(accepted), int(tested), expected, int(rounds))

    def _learn_spread(self) -> None:
        """The spread of the rounds since the swap, which were clean, about what was expected of them."""
        residual, variance, sequences = self._sums
        if not variance:
            return
        # the expectation is an estimate, too, and all these rounds were held against the same one
        known = sum(float(counts[0, 0]) for counts in self._before.values())
        square = residual**2 / (variance * (1.0 + sequences / known))
        self._by_round = KEEP * self._by_round + self._squares
        self._by_swap = KEEP * self._by_swap + [min(square, 9.0), 1.0]

    def _step(
        self, counts: Float[np.ndarray, "2 D"], a: Float[np.ndarray, "D"], weight: Float[np.ndarray, "D"]
    ) -> Float[np.ndarray, "D"]:
        """The log-likelihood ratios of a round, by depth; see the top. Nothing where too little is known, or expected."""
        phi = self.phi
        p = np.minimum(a - 2 * np.sqrt(phi * a * (1 - a) / weight), 0.98)
        judged = p > LEAST
        p = np.where(judged, p, 0.5)
        p0, p1, (n, x) = TOLERATED * p, COLLAPSED * p, counts
        return np.where(judged, x * np.log(p1 / p0) + (n - x) * np.log((1 - p1) / (1 - p0)), 0.0) / phi

    def _pooled(self, kind: tuple[Hashable, ...]) -> Float[np.ndarray, "2 D"]:
        total = np.zeros((2, self._depth))
        for key, counts in self._before.items():
            if key[: len(kind)] == kind:
                total += counts
        return total
