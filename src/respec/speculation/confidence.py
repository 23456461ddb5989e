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
# A bin begins with what is common to all leads, for so many tokens.
STRENGTH = 8.0
# exp(-lead) of a bin, by which doubt falls.
DOUBT = np.exp(-(np.append(0.0, EDGES) + np.append(EDGES, 10.0)) / 2)


@dataclass(frozen=True)
class Promise:
    """What a drafter's chains of up to s = 1 .. D tokens (index s - 1) would give one sequence at each floor, the look-ups' guesses beside them: tokens
    and rows beyond the first, and the expected square of those tokens. `drafted_FD`: the chance that the drafter goes as deep as d. Made by
    `promise`, read by the solver; `chains` it is seen from.
    """

    tokens_FS: Float[np.ndarray, "F D"]
    rows_FS: Float[np.ndarray, "F D"]
    square_FS: Float[np.ndarray, "F D"]
    drafted_FD: Float[np.ndarray, "F D"]
    chains: int


@dataclass(frozen=True)
class Bound:
    """A `types.Cut`: tables of chances by drafter, and the floor of a round."""

    floor: float
    beside: tuple[str, ...]
    deep: int
    chance_KD: Mapping[str, Float[np.ndarray, "K D"]] = field(repr=False)

    def chance(
        self, drafter: str, depth: int | Int[np.ndarray, "D"], lead: Float[np.ndarray, "*many"]
    ) -> Float[np.ndarray, "*many"]:
        """See `types.Cut`."""
        found = self.chance_KD[drafter][_bin(lead), np.minimum(depth, DEPTHS) - 1]
        return np.where(np.isnan(lead), 0.0, found)


class Confidence:
    """Of each of `drafters`, those that say how sure they are of a token, and of the look-ups asked `beside` them: tested and accepted tokens by lead
    and depth, faded over `memory` sequences; and the leads of the latest `chains`. A promise is made anew after half as many chains as it was made from,
    where a round counts as `renew` at least: a drafter that was tried in a few rounds of many sequences, and left, is judged by all of them."""

    def __init__(
        self,
        drafters: Sequence[str],
        depth: int,
        beside: Sequence[str] = (),
        memory: float = 4000.0,
        chains: int = 192,
        renew: int = 8,
    ) -> None:
        self.drafters, self.beside = tuple(drafters), tuple(beside)[:1]
        self._depth, self._memory, self._most, self._renew = depth, memory, chains, renew
        self._counts: dict[str, Float[np.ndarray, "2 K D"]] = {}
        self._leads: dict[str, Float[np.ndarray, "N 2 D"]] = {}
        self._promised: dict[str, Promise] = {}
        self._age: dict[str, int] = {}

    def learn(self, leads: Sequence[Leads]) -> None:
        """Takes in a round's drafts: the plan's drafter's, then, of the same sequences, those made beside."""
        for found in leads:
            self._count(found)
        name, rows = leads[0].drafter, len(leads[0].lead_BD)
        both = np.full((rows, 2, self._depth), np.nan)
        for i, found in enumerate(leads[:2]):
            both[:, i, : found.lead_BD.shape[1]] = found.lead_BD[:, : self._depth]
        before = self._leads.get(name, np.zeros((0, 2, self._depth)))
        self._leads[name] = np.concatenate([before, both])[-self._most :]
        self._age[name] = self._age.get(name, 0) + max(rows, self._renew)

    def _count(self, leads: Leads) -> None:
        lead_BD = leads.lead_BD[:, : self._depth]
        counts = self._counts.setdefault(leads.drafter, np.zeros((2, len(EDGES) + 1, DEPTHS)))
        counts *= np.exp(-len(lead_BD) / self._memory)
        depth = np.arange(lead_BD.shape[1])
        known = (depth < leads.tested_B[:, None]) & ~np.isnan(lead_BD)
        bins, classes = _bin(lead_BD), np.broadcast_to(np.minimum(depth, DEPTHS - 1), lead_BD.shape)
        for row, chosen in zip(counts, (known, known & (depth < leads.stood_B[:, None])), strict=True):
            np.add.at(row, (bins[chosen], classes[chosen]), 1.0)

    def bound(self, drafter: str, floor: float) -> Bound:
        """Where to cut its drafts, and those made beside, at this floor."""
        return Bound(floor, self.beside, self._depth, {name: self.chances(name) for name in (drafter, *self.beside)})

    def chances(self, drafter: str) -> Float[np.ndarray, "K D"]:
        """P(accepted | lead, depth, those before it are), never falling with the lead."""
        tested, stood = self._counts.get(drafter, np.zeros((2, len(EDGES) + 1, DEPTHS)))
        many, hits = tested.sum(axis=1), stood.sum(axis=1)
        # a lead of m is lost where two models disagree by m on the odds of two tokens: seldom, as exp(-m); depths share what they do not know
        doubt = ((many - hits).sum() + STRENGTH / 2) / (many @ DOUBT + STRENGTH)
        start = np.maximum(1 - doubt * DOUBT, 0.0)
        shallow = ((hits + STRENGTH * start) / (many + STRENGTH))[:, None]
        return np.maximum.accumulate((stood + STRENGTH * shallow) / (tested + STRENGTH), axis=0)

    def promise(self, drafter: str) -> Promise | None:
        """What its chains of late would have given at each floor; None while too few are known."""
        leads = self._leads.get(drafter)
        if leads is None or len(leads) < self._most // 6:
            return None
        made = self._promised.get(drafter)
        if made is None or self._age[drafter] >= made.chains / 2:
            beside = self.chances(self.beside[0]) if self.beside else np.zeros((len(EDGES) + 1, DEPTHS))
            made = self._promised[drafter] = promise(self.chances(drafter), beside, leads)
            self._age[drafter] = 0
        return made

    def known(self, drafter: str) -> int:
        """How many of its chains of late are known, up to those remembered."""
        return len(self._leads.get(drafter, ()))

    def discount(self, keep: float, drafter: str | None = None) -> None:
        """Weights have been swapped: what was seen before counts `keep` as much, for one drafter or for all."""
        for name, counts in self._counts.items():
            if drafter in (None, name):
                counts *= keep

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `restore`; a lead may be NaN."""
        counts, leads = ({name: x.tolist() for name, x in kept.items()} for kept in (self._counts, self._leads))
        return {"counts": counts, "leads": leads}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Takes over what another of the same depth had learned."""
        self._counts = {name: np.array(x, float) for name, x in data["counts"].items()}
        self._leads = {name: np.array(x, float).reshape(-1, 2, self._depth) for name, x in data["leads"].items()}
        self._promised, self._age = {}, {}


def promise(
    own_KD: Float[np.ndarray, "K D"], beside_KD: Float[np.ndarray, "K D"], lead_NCD: Float[np.ndarray, "N 2 D"]
) -> Promise:
    """What chains with these leads give at each floor, where the better of the drafter's and the look-up's is verified. The drafter's leads that
    are not known, since its chain was cut above, are taken to be as good as those that are, at that depth or the last one known."""
    own_ND = _stands(own_KD, lead_NCD[:, 0], True)[None]
    beside_ND = _stands(beside_KD, lead_NCD[:, 1], False)[None]
    floor = FLOORS[:, None, None]
    kept_FND, guessed_FND = own_ND >= floor, (beside_ND >= floor) & (beside_ND > 0)
    worth_FNS = np.cumsum((own_ND - floor) * kept_FND, axis=2)
    other_FN = ((beside_ND - floor) * guessed_FND).sum(axis=2)
    guess_FNS = other_FN[:, :, None] > worth_FNS
    odd = 2 * np.arange(lead_NCD.shape[2]) + 1

    def better(weight: Float[np.ndarray, "*F N D"], other: Float[np.ndarray, "*F N D"]) -> Float[np.ndarray, "F S"]:
        whole = (other * guessed_FND).sum(axis=2)[:, :, None]
        return np.where(guess_FNS, whole, np.cumsum(weight * kept_FND, axis=2)).mean(axis=1)

    # a token is drafted to be looked at where the one above it was worth its row, whichever chain is then chosen
    tried_FND = np.concatenate([np.ones_like(kept_FND[:, :, :1]), kept_FND[:, :, :-1]], axis=2)
    ones = np.ones_like(own_ND)
    return Promise(
        better(own_ND, beside_ND),
        better(ones, ones),
        better(odd * own_ND, odd * beside_ND),
        tried_FND.mean(axis=1),
        len(lead_NCD),
    )


def _stands(
    chance_KD: Float[np.ndarray, "K D"], lead_ND: Float[np.ndarray, "N D"], goes_on: bool
) -> Float[np.ndarray, "N D"]:
    """The chance that each token stands with all before it. Where there is none it would have gone on (`goes_on`), or there was none to be had."""
    step = chance_KD[_bin(lead_ND), np.minimum(np.arange(lead_ND.shape[1]), DEPTHS - 1)]
    unknown, mean, last = np.isnan(lead_ND), np.zeros(lead_ND.shape[1]), 0.5
    for d in range(lead_ND.shape[1]) if goes_on else ():
        if not unknown[:, d].all():
            last = float(step[~unknown[:, d], d].mean())
        mean[d] = last
    return np.cumprod(np.where(unknown, mean, step), axis=1)


def _bin(lead: Float[np.ndarray, "*many"]) -> Int[np.ndarray, "*many"]:
    """Which bin a lead is in; none known is the first."""
    return np.searchsorted(EDGES, np.nan_to_num(lead, nan=0.0, posinf=np.inf), side="right")
