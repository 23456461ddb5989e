"""How far drafts are accepted, by drafter and depth, from faded counts; what that promises in tokens, and how surely.

A sequence asked for depth s goes on from depth d - 1 to d with probability v_d · a_d: v_d that the drafter has a node there (a look-up
drafter often has none), a_d that the target agrees. A_d = Π_{i<=d} v_i a_i is the chance that depth d stands; a round yields
1 + Σ_{d<=s} A_d tokens a sequence, the target's own included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from respec.types import Load, RoundRecord

# What is believed of a drafter nobody has seen: little. It is tried at once where a few rows more cost nothing, else by probes.
UNSEEN_AVAILABLE = 0.8
UNSEEN_ACCEPT = 0.3
# A round whose accepted tokens are this many standard deviations from what is believed ends the belief: its evidence keeps this weight.
SURPRISE, SURPRISED_KEEP = 4.0, 0.1


@dataclass(frozen=True)
class Outlook:
    """What plans of depth 0..D of one drafter promise one sequence and round, at index s. Made by `Acceptance.outlook`.

    `tokens_S` are expected tokens, bonus token included; `error_S` their standard error, from the evidence; `spread_S` the
    standard deviation of one sequence's tokens in one round; `nodes_S` the drafted nodes of a chain.
    """

    tokens_S: Float[np.ndarray, "D+1"]
    error_S: Float[np.ndarray, "D+1"]
    spread_S: Float[np.ndarray, "D+1"]
    nodes_S: Float[np.ndarray, "D+1"]


class _Evidence:
    """Faded counts of sequences by depth: asked to draft, drafted; on the accepted path: asked to go on, tested, accepted."""

    def __init__(self, depth: int) -> None:
        self.counts = np.zeros((5, depth))
        self.asked, self.drafted, self.parents, self.tested, self.accepted = self.counts


class Acceptance:
    """Per drafter and branching, and depth. Counts fade: with `sequences` tested at depth 1, with `rounds` in use, with `idle` rounds
    of others, at every swap, and at once when a round contradicts them.

    `strength` is the weight of a prior, in sequences: depth d starts from what is known of d - 1, a branching from the same drafter's
    chain, a drafter without evidence from the constants above.
    """

    def __init__(
        self,
        depth: int = 16,
        sequences: float = 500.0,
        rounds: float = 200.0,
        idle: float = 400.0,
        strength: float = 4.0,
    ) -> None:
        self.depth = depth
        self._sequences = sequences
        self._rounds = rounds
        self._idle = idle
        self._strength = strength
        self._evidence: dict[tuple[str, int], _Evidence] = {}

    def observe(self, record: RoundRecord, asked_D: Sequence[int] | None = None) -> None:
        """Counts a round; one without counts by depth teaches nothing. `asked_D`: how many sequences had room for depth d in their
        budget; all of them when it is not given."""
        plan = record.plan
        if not plan.n or not plan.s or not record.drafted_D:
            return
        s = min(plan.s, self.depth)
        drafted, tested, accepted = (
            _padded(values, s) for values in (record.drafted_D, record.tested_D, record.accepted_D)
        )
        asked = np.full(s, float(record.active)) if asked_D is None else _padded(asked_D, s)
        evidence = self._of(plan.drafter, plan.t)
        self._fade_all(plan.drafter, plan.t, tested, accepted)
        evidence.asked[:s] += np.maximum(asked, drafted)
        evidence.drafted[:s] += drafted
        # who could have gone on to depth d: accepted at d - 1, and asked that deep
        evidence.parents[:s] += np.maximum(np.minimum(np.append(asked[:1], accepted[:-1]), asked), tested)
        evidence.tested[:s] += tested
        evidence.accepted[:s] += accepted

    def observe_shadow(
        self,
        drafter: str,
        tested_D: Sequence[float],
        accepted_D: Sequence[float],
        weight: float,
        t: int = 1,
        asked_D: Sequence[float] = (),
        drafted_D: Sequence[float] = (),
        parents_D: Sequence[float] = (),
        memory: float | None = None,
    ) -> None:
        """Evidence about an idle drafter: from replaying finished rollouts, or from the laws that its learner sees.

        `weight` turns replayed positions into sequences' worth of evidence: below 1 where replay flatters, or is long. What was
        believed goes at once where this contradicts it. Without the three before the last it says nothing about whether there are drafts. `memory`:
        sequences over which earlier evidence fades; None: as of a drafter in use.
        """
        seen = np.stack([_padded(x, self.depth) for x in (asked_D, drafted_D, parents_D, tested_D, accepted_D)])
        seen *= weight
        _, _, parents, tested, accepted = seen
        contradicted = _surprising(accepted, tested, self.accept(drafter, t)) or _surprising(
            np.minimum(tested, parents), parents, self.available(drafter, t)
        )
        evidence, new = self._of(drafter, t), max(float(tested[0]), float(seen[0, 0]))
        if contradicted:
            evidence.counts *= SURPRISED_KEEP * min(1.0, new / max(evidence.tested[0], evidence.asked[0], new))
        else:
            evidence.counts *= math.exp(-new / (memory or self._sequences))
        evidence.counts += seen

    def discount(self, keep: float, drafter: str | None = None) -> None:
        """Weights have been swapped: what was seen before counts `keep` as much, for one drafter or for all."""
        for (name, _), evidence in self._evidence.items():
            if drafter in (None, name):
                evidence.counts *= keep

    def effective(self, drafter: str, t: int = 1) -> float:
        """Sequences' worth of evidence at depth 1, live and shadow."""
        return float(self._of(drafter, t).tested[0])

    def accept(self, drafter: str, t: int = 1) -> Float[np.ndarray, "D"]:
        """a_d: P(accepted at depth d | tested there)."""
        evidence = self._of(drafter, t)
        prior = np.full(self.depth, np.nan) if t == 1 else self.accept(drafter)
        return self._posterior(evidence.accepted, evidence.tested, UNSEEN_ACCEPT, prior)

    def available(self, drafter: str, t: int = 1) -> Float[np.ndarray, "D"]:
        """v_d: P(there is a node at depth d | all shallower ones accepted)."""
        evidence = self._of(drafter, t)
        prior = np.full(self.depth, np.nan) if t == 1 else self.available(drafter)
        return self._posterior(evidence.tested, evidence.parents, UNSEEN_AVAILABLE, prior)

    def drafted(self, drafter: str, t: int = 1) -> Float[np.ndarray, "D"]:
        """P(a node at depth d is drafted), accepted path or not: what a round has to verify."""
        evidence = self._of(drafter, t)
        nan = np.full(self.depth, np.nan)
        return np.minimum.accumulate(self._posterior(evidence.drafted, evidence.asked, UNSEEN_AVAILABLE, nan))

    def outlook(self, drafter: str, t: int, room_D: Float[np.ndarray, "D"]) -> Outlook:
        """`room_D`: share of sequences whose remaining budget leaves room for an accepted token at depth d and the bonus token."""
        a, v = self.accept(drafter, t), self.available(drafter, t)
        evidence = self._of(drafter, t)
        stands = np.cumprod(v * a) * room_D
        # relative variance of each factor, as of a beta posterior
        relative = (1 - a) / (a * (evidence.tested + self._strength + 1))
        relative += (1 - v) / (v * (evidence.parents + self._strength + 1))
        total = np.append(0.0, np.cumsum(stands))
        # d log-factor_d moves everything from depth d on: Σ_{j=d..s} A_j
        below = np.tril(total[1:, None] - total[None, :-1])
        variance = (below**2 * relative).sum(axis=1)
        second = np.cumsum((2 * np.arange(1, self.depth + 1) - 1) * stands)
        return Outlook(
            1 + total,
            np.append(0.0, np.sqrt(variance)),
            np.append(0.0, np.sqrt(np.maximum(second - total[1:] ** 2, 0.0))),
            np.append(0.0, np.cumsum(self.drafted(drafter, t) * room_D)),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "depth": self.depth, "sequences": self._sequences, "rounds": self._rounds, "idle": self._idle, "strength": self._strength,
            "evidence": [
                {"drafter": drafter, "t": t, "counts": evidence.counts.tolist()}
                for (drafter, t), evidence in self._evidence.items()
            ],
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Acceptance:
        acceptance = Acceptance(data["depth"], data["sequences"], data["rounds"], data["idle"], data["strength"])
        for item in data["evidence"]:
            acceptance._of(item["drafter"], item["t"]).counts[:] = item["counts"]
        return acceptance

    def _fade_all(self, drafter: str, t: int, tested_D: np.ndarray, accepted_D: np.ndarray) -> None:
        """Makes room for a round's counts; what is idle ages, and what the round contradicts goes."""
        for evidence in self._evidence.values():
            evidence.counts *= math.exp(-1.0 / self._idle)
        surprised = _surprising(accepted_D, tested_D, self.accept(drafter, t)[: len(tested_D)])
        keep = SURPRISED_KEEP if surprised else math.exp(-max(tested_D[0] / self._sequences, 1.0 / self._rounds))
        self._of(drafter, t).counts *= keep

    def _of(self, drafter: str, t: int) -> _Evidence:
        if (drafter, t) not in self._evidence:
            self._evidence[drafter, t] = _Evidence(self.depth)
        return self._evidence[drafter, t]

    def _posterior(
        self, hits_D: np.ndarray, trials_D: np.ndarray, unseen: float, prior_D: np.ndarray
    ) -> Float[np.ndarray, "D"]:
        """Beta means; where there is no prior of its own (NaN), a depth's prior is the mean of the depth above it."""
        values, above = list[float](), unseen
        for hits, trials, prior in zip(hits_D.tolist(), trials_D.tolist(), prior_D.tolist(), strict=True):
            above = (hits + self._strength * (above if math.isnan(prior) else prior)) / (trials + self._strength)
            values.append(min(max(above, 1e-6), 1.0))
        return np.array(values)


def fairly(record: RoundRecord) -> RoundRecord:
    """A round as it would have been with nothing cut: of one that was, its first depth, where all that was drafted is tested."""
    if not record.cut:
        return record
    tested, accepted = record.fair_D
    return replace(record, plan=replace(record.plan, s=1, n=1), drafted_D=tested, tested_D=tested, accepted_D=accepted)


def asked(load: Load | None, record: RoundRecord) -> list[int] | None:
    """How many sequences had room for each depth; None where that is not known."""
    remaining = load.remaining_B if load else ()
    if len(remaining) != record.active:
        return None
    return [sum(left > d for left in remaining) for d in range(1, record.plan.s + 1)]


def _surprising(hits_D: np.ndarray, trials_D: np.ndarray, chance_D: np.ndarray) -> bool:
    """Whether the hits are further from their expectation than chance takes them."""
    spread = math.sqrt(float((trials_D * chance_D * (1 - chance_D)).sum()) + 1.0)
    return abs(float((hits_D - trials_D * chance_D).sum())) > SURPRISE * spread


def _padded(values: Sequence[float], length: int) -> Float[np.ndarray, "D"]:
    """The first `length` values, zeros after the last."""
    padded = np.zeros(length)
    padded[: min(length, len(values))] = values[:length]
    return padded
