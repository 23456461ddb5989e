"""A drafter's accepted tokens after a swap of weights, held against what they were before it: a sequential test for collapse.

Page's cumulative sum (1954) of the log-likelihood ratio of "acceptance has collapsed" over "acceptance is as it was, or somewhat lower":

    S <- max(0, S + (1/φ) Σ_d [x_d log(p1_d / p0_d) + (n_d - x_d) log((1 - p1_d) / (1 - p0_d))]),   alarm at S >= log(ODDS)

over the rounds since the swap, x_d of n_d sequences having accepted depth d. With a_d the acceptance before the swap less two of its standard
errors, p0 = TOLERATED·a is the worst that a clean swap does and p1 = COLLAPSED·a a collapse. A depth is judged given the ones above it, so its
term is that of a binomial however many depths there are; a draft that is missing where there was room for one counts as refused.

Level. E[exp(step)] <= 1 for every acceptance from p0 up, since p1 < p0 makes it fall in p. So, by Lorden (1971), the mean number of rounds
between false alarms is at least ODDS = 10,000 were every swap as bad as is tolerated. Without any fall it is far more: for a = 0.7,
0.7·(1/2)^θ + 0.3·(0.72/0.44)^θ = 1 at θ = 2.2, so that an excursion ends in an alarm with probability below ODDS^-2.2 = 2e-9.

Power. With a = 0.7 a sequence whose acceptance has gone to 0.05 adds 0.43 in the mean, so 22 sequences do, times φ.

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
    """What raised an alarm: since acceptance began to fall, so many rounds ago, `accepted` of `tested` first drafted tokens; `expected` were."""

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
        self._score, self._rounds = 0.0, 0
        self._seen = np.zeros(3)
        # Σ squares and count of standardized residuals, by round; and of this swap's rounds Σ residual, Σ variance
        self._by_round = np.array([PHI * PHI_ROUNDS, PHI_ROUNDS])
        self._by_swap = np.array([PHI * PHI_SWAPS, PHI_SWAPS])
        self._sum = np.zeros(2)

    @property
    def phi(self) -> float:
        """The overdispersion that the test allows for."""
        squares, counts = np.array([self._by_round, self._by_swap]).T
        return float(np.clip((squares / counts).max(), *PHI_BOUNDS))

    def swapped(self) -> None:
        """Weights have changed, and those before did well: what they did is what is expected now."""
        if not self._since:
            return
        for counts in self._before.values():
            counts *= KEEP
        for key, counts in self._since.items():
            self._before[key] = self._before.get(key, 0.0) + counts
        if self._sum[1] > 0:
            self._by_swap = KEEP * self._by_swap + np.array([self._sum[0] ** 2 / self._sum[1], 1.0])
        self.again()

    def again(self) -> None:
        """Begins anew with the estimate as it is: what was seen since the swap is not believed."""
        self._since, self._score, self._rounds = {}, 0.0, 0
        self._seen, self._sum = np.zeros(3), np.zeros(2)

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
        self._by_round = math.exp(-1 / (10 * PHI_ROUNDS)) * self._by_round + [min(residual**2 / variance, 9.0), 1.0]
        self._sum += [residual, variance]
        if self._score + step <= 0:
            self._score, self._rounds, self._seen = 0.0, 0, np.zeros(3)
            return None
        self._score += step
        self._rounds += 1
        self._seen += [counts[1, 0], asked, mean]
        if self._score < math.log(ODDS):
            return None
        accepted, tested, expected = self._seen.tolist()
        return Sighting(int(accepted), int(tested), expected, self._rounds)

    def _step(
        self, counts: Float[np.ndarray, "2 D"], a: Float[np.ndarray, "D"], weight: Float[np.ndarray, "D"]
    ) -> float:
        """The log-likelihood ratio of a round; see the top."""
        phi = self.phi
        least = np.minimum(a - 2 * np.sqrt(phi * a * (1 - a) / weight), 0.98)
        judged = least > LEAST
        n, x, p = counts[0, judged], counts[1, judged], least[judged]
        p0, p1 = TOLERATED * p, COLLAPSED * p
        return float((x * np.log(p1 / p0) + (n - x) * np.log((1 - p1) / (1 - p0))).sum()) / phi

    def _pooled(self, kind: tuple[Hashable, ...]) -> Float[np.ndarray, "2 D"]:
        total = np.zeros((2, self._depth))
        for key, counts in self._before.items():
            if key[: len(kind)] == kind:
                total += counts
        return total
