"""The opening trial of a drafter whose drafts can be cut: what cutting is worth is seen from its own drafts only, and a few rounds show it.

At a large batch a head verified whole is predicted slow, so it is not run, and so nobody learns what it is worth cut. One round of 64 sequences
is 64 chains; a trial ends when enough are known, or after so many rounds, and is cut from its first round on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from respec.speculation.confidence import Confidence
from respec.types import Plan

# Chains that make a drafter known, and rounds that its trial may take in a controller's life.
KNOWN, ROUNDS = 192, 6
# How deep it drafts meanwhile, and below which chance its tokens are left out.
DEPTH, FLOOR = 4, 0.6


@dataclass
class Trials:
    """Rounds of trial had so far, by drafter."""

    rounds: dict[str, int] = field(default_factory=dict)

    def wanted(self, plans: Sequence[Plan], confidence: Confidence | None, shuts: Callable[[str], bool]) -> int | None:
        """Which of the plans to try next, if one is to be: the deepest chain, up to a depth, of a drafter that is not known."""
        if confidence is None:
            return None
        for name in confidence.drafters:
            if confidence.known(name) >= KNOWN or self.rounds.get(name, 0) >= ROUNDS or shuts(name):
                continue
            chains = [i for i, plan in enumerate(plans) if (plan.drafter, plan.t) == (name, 1) and plan.s <= DEPTH]
            if chains:
                return max(chains, key=lambda i: plans[i].s)
        return None

    def begin(self, drafter: str) -> None:
        """One round more."""
        self.rounds[drafter] = self.rounds.get(drafter, 0) + 1
