"""Which drafted tokens are worth a row: by how far each won its race, held against what the target then drew in its place.

In `matching` drafter and target race with the same numbers. The token that arrived first by a lead m = log(second arrival / first) is the
target's too unless they disagree by more than m on the odds of two tokens, so its chance to be accepted rises with m, from chance to
certainty. How fast is learned. A token is verified while the chance of its whole path is above a floor: the price of a row in tokens, which
depends on the load. What each floor would give is seen from the leads of drafts of late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from respec.types import Leads

# Leads are told apart up to here; the last bin has no end.
EDGES = np.array([0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Depths are told apart up to here: below, a drafter goes on from its own guesses.
DEPTHS = 3
# Floors to choose from. Without one everything is verified, and with the last only what is all but certain.
FLOORS = np.array([0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
# A bin begins with what all bins below this lead have in common, for so many tokens.
STRENGTH = 8.0


@dataclass(frozen=True)
class Promise:
    """What a drafter's chains would give one sequence at each floor, by depth (d = 0 .. D - 1 is depth d + 1): the chance that a token is there and
    stands, that it is verified, and that it is drafted at all. `luck_F`, `error_F`: see `acceptance.Outlook`. Made by `Confidence.promise`.
    """

    stands_FD: Float[np.ndarray, "F D"]
    verified_FD: Float[np.ndarray, "F D"]
    drafted_FD: Float[np.ndarray, "F D"]
    chains: int


@dataclass(frozen=True)
class Bound:
    """A `types.Cut`: the table of one drafter's chances, and the floor of a round."""

    floor: float
    chance_KD: Float[np.ndarray, "K D"] = field(repr=False)

    def chance(self, depth: int, lead_B: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
        """See `types.Cut`."""
        return self.chance_KD[_bin(lead_B), min(depth, DEPTHS) - 1]


class Confidence:
    """Of each of `drafters`, those that say how their tokens won: tested and accepted tokens by lead and depth, faded over `memory` sequences, and the leads of its latest `chains`. `renew`
    rounds pass before promises are made anew."""

    def __init__(
        self, drafters: Sequence[str], depth: int, memory: float = 4000.0, chains: int = 256, renew: int = 8
    ) -> None:
        self.drafters = tuple(drafters)
        self._depth, self._memory, self._most, self._renew = depth, memory, chains, renew
        self._counts: dict[str, Float[np.ndarray, "2 K D"]] = {}
        self._leads: dict[str, Float[np.ndarray, "N D"]] = {}
        self._promised: dict[str, Promise] = {}
        self._age: dict[str, int] = {}

    def learn(self, leads: Leads) -> None:
        """Takes in a round's drafts."""
        name, lead_BD = leads.drafter, leads.lead_BD[:, : self._depth]
        counts = self._counts.setdefault(name, np.zeros((2, len(EDGES) + 1, DEPTHS)))
        depth = np.arange(lead_BD.shape[1])
        known = (depth < leads.tested_B[:, None]) & ~np.isnan(lead_BD)
        stood = known & (depth < leads.stood_B[:, None])
        at = _bin(lead_BD), np.broadcast_to(np.minimum(depth, DEPTHS - 1), lead_BD.shape)
        counts *= np.exp(-len(lead_BD) / self._memory)
        for row, chosen in zip(counts, (known, stood), strict=True):
            np.add.at(row, (at[0][chosen], at[1][chosen]), 1.0)
        drafted = lead_BD[~np.isnan(lead_BD[:, :1]).any(axis=1)] if lead_BD.shape[1] else lead_BD
        padded = np.full((len(drafted), self._depth), np.nan)
        padded[:, : drafted.shape[1]] = drafted
        before = self._leads.get(name, np.zeros((0, self._depth)))
        self._leads[name] = np.concatenate([before, padded])[-self._most :]
        self._age[name] = self._age.get(name, self._renew) + 1

    def bound(self, drafter: str, floor: float) -> Bound:
        """Where to cut its drafts at this floor."""
        return Bound(floor, self.chances(drafter))

    def chances(self, drafter: str) -> Float[np.ndarray, "K D"]:
        """P(accepted | lead, depth, those before it are), never falling with the lead."""
        tested, stood = self._counts.get(drafter, np.zeros((2, len(EDGES) + 1, DEPTHS)))
        # of all leads up to here: a surer one is at least as good; depths share what they do not know
        many, hits = np.cumsum(tested.sum(axis=1)), np.cumsum(stood.sum(axis=1))
        below = ((hits + STRENGTH / 2) / (many + STRENGTH))[:, None]
        shallow = (stood.sum(axis=1, keepdims=True) + STRENGTH * below) / (tested.sum(axis=1, keepdims=True) + STRENGTH)
        return np.maximum.accumulate((stood + STRENGTH * shallow) / (tested + STRENGTH), axis=0)

    def promise(self, drafter: str) -> Promise | None:
        """What its chains of late would have given at each floor; None while too few are known."""
        leads = self._leads.get(drafter)
        if leads is None or len(leads) < self._most // 8:
            return None
        if self._age[drafter] >= self._renew or drafter not in self._promised:
            self._promised[drafter], self._age[drafter] = promise(self.chances(drafter), leads), 0
        return self._promised[drafter]

    def discount(self, keep: float, drafter: str | None = None) -> None:
        """Weights have been swapped: what was seen before counts `keep` as much, for one drafter or for all."""
        for name, counts in self._counts.items():
            if drafter in (None, name):
                counts *= keep

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `restore`; NaN is None."""
        leads = {name: np.where(np.isnan(x), None, x).tolist() for name, x in self._leads.items()}
        return {"counts": {name: x.tolist() for name, x in self._counts.items()}, "leads": leads}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Takes over what another of the same depth had learned."""
        self._counts = {name: np.array(x, float) for name, x in data["counts"].items()}
        self._leads = {name: np.array(x, float).reshape(-1, self._depth) for name, x in data["leads"].items()}
        self._promised, self._age = {}, dict.fromkeys(self._leads, self._renew)


def promise(chance_KD: Float[np.ndarray, "K D"], lead_ND: Float[np.ndarray, "N D"]) -> Promise:
    """What chains with these leads give at each floor. A lead that is not known, since its chain was cut above, is taken to be as good as those
    that are, at its depth or the last one known."""
    depth = np.minimum(np.arange(lead_ND.shape[1]), DEPTHS - 1)
    unknown = np.isnan(lead_ND)
    step = chance_KD[_bin(lead_ND), np.broadcast_to(depth, lead_ND.shape)]
    mean, last = np.zeros(lead_ND.shape[1]), 0.5
    for d in range(lead_ND.shape[1]):
        if not unknown[:, d].all():
            last = float(step[~unknown[:, d], d].mean())
        mean[d] = last
    stands_ND = np.cumprod(np.where(unknown, mean, step), axis=1)
    kept_FND = stands_ND >= FLOORS[:, None, None]
    # a token is drafted to be looked at, where the one above it was worth its row
    tried_FND = np.concatenate([np.ones_like(kept_FND[:, :, :1]), kept_FND[:, :, :-1]], axis=2)
    return Promise((stands_ND * kept_FND).mean(axis=1), kept_FND.mean(axis=1), tried_FND.mean(axis=1), len(lead_ND))


def _bin(lead: Float[np.ndarray, "*many"]) -> Int[np.ndarray, "*many"]:
    """Which bin a lead is in; none known is the first."""
    return np.searchsorted(EDGES, np.nan_to_num(lead, nan=0.0, posinf=np.inf), side="right")
