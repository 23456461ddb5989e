"""Shares drafting out among the requests of a round, where it is known who will be long: those draft deeper that end the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from respec.speculation.acceptance import Acceptance
from respec.speculation.cost_model import CostModel
from respec.speculation.depth import Chains, depths, prices, token_seconds
from respec.speculation.lengths import Lengths
from respec.speculation.solver import MARGIN
from respec.types import Load, Plan, Rollout, Version

# Draws of the remaining lengths.
DRAWS = 8
# What acceptance and cost promise is looked up anew after so many looks.
REFRESH = 32


@dataclass(frozen=True)
class Shared:
    """A plan of which every active sequence takes its own depth; `gain` as in `depth.depths`."""

    plan: Plan
    depth_B: tuple[int, ...]
    gain: float

    @property
    def reason(self) -> str:
        """For a person."""
        return (
            f"depths {min(self.depth_B)}-{max(self.depth_B)}, the longest first: saves the rollout {self.gain:.0%} of this round"
            " over one depth for all"
        )


class Sharing:
    """Knows the lengths of finished completions, and by them the depths of those in the making. `plans` are the controller's; a gain below
    `margin` is none, since lengths are guesses."""

    def __init__(self, plans: Sequence[Plan], cost: CostModel, margin: float = MARGIN) -> None:
        chains = [plan for plan in plans if plan.n and plan.t == 1]
        self._depths = {
            name: tuple(sorted(p.s for p in chains if p.drafter == name)) for name in {p.drafter for p in chains}
        }
        self._cost, self._margin = cost, margin
        self._lengths = Lengths()
        self._chains: Chains | None = None
        self._token_s = np.zeros(0)
        self._version, self._looks = Version(), 0

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """A rollout has ended; these are all of its completions."""
        self._lengths.learn(rollouts)

    def look(self, load: Load, plan: Plan, drafter: str, acceptance: Acceptance) -> Shared | None:
        """The round's depths by this drafter, or None where `plan` for all is as good.

        Where sequences wait every slot is refilled, and a token is worth the same in all of them.
        """
        known = self._lengths.known and drafter in self._depths
        if not known or load.waiting or load.active < 2 or plan.t > 1:
            return None
        chains, token_s = self._promise(load, drafter, acceptance)
        chance_KB, luck_KB = _scenarios(load.active)
        left_KB = self._lengths.draws(load, chance_KB)
        # how soon a request ends is also a matter of the luck of its drafts
        tokens, spread = (x[chains.depths[-1]] for x in (chains.outlook.tokens_S, chains.outlook.spread_S))
        left_KB += luck_KB * np.sqrt(left_KB * spread**2 / tokens)
        depth_B, gain = depths(load, plan.s, prices(left_KB, token_s[: load.active + 1]), chains)
        if gain < self._margin or depth_B.min() == depth_B.max():
            return None
        s = next(s for s in chains.depths if s >= depth_B.max())
        return Shared(Plan(drafter, s, 1, s), tuple(depth_B.tolist()), gain)

    def _promise(self, load: Load, drafter: str, acceptance: Acceptance) -> tuple[Chains, Float[np.ndarray, "B+1"]]:
        """The drafter's promises, and what a token takes by batch; made anew now and then, and where they do not fit."""
        self._looks += 1
        stale = self._chains is None or self._chains.drafter != drafter or load.version != self._version
        if stale or load.active >= len(self._token_s) or self._looks % REFRESH == 0:
            outlook = acceptance.outlook(drafter, 1, np.ones(acceptance.depth))
            self._chains = Chains(drafter, self._depths[drafter], outlook, self._cost)
            self._token_s = token_seconds(self._chains, load.active, load.context)
            self._version = load.version
        assert self._chains is not None
        return self._chains, self._token_s


@lru_cache(maxsize=256)
def _scenarios(batch: int) -> tuple[Float[np.ndarray, "K B"], Float[np.ndarray, "K B"]]:
    """Evenly spread numbers in [0, 1) and from a standard normal, each request's in an order of its own; the same at every look, so that
    depths do not flicker."""
    rng = np.random.default_rng(batch)
    even = (np.arange(DRAWS) + 0.5) / DRAWS
    normal = np.array([NormalDist().inv_cdf(x) for x in even])
    chance, luck = (np.argsort(rng.random((DRAWS, batch)), axis=0) for _ in range(2))
    return even[chance], normal[luck]
