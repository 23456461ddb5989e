"""Probes of plans that are not believed best: how much time they may take, and the one under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from respec.speculation.decision import name_of
from respec.types import Plan


@dataclass
class Budget:
    """Seconds of probing allowed and spent."""

    share: float
    elapsed_s: float = 0.0
    spent_s: float = 0.0

    def allows(self, seconds: float) -> bool:
        return self.spent_s + seconds <= self.share * (self.elapsed_s + seconds)


@dataclass
class Purses:
    """A budget for each octave of the batch, `share` of the time spent there: what small batches have saved up is not for trying in large ones."""

    share: float
    by_octave: dict[int, Budget] = field(default_factory=dict)

    def of(self, active: int) -> Budget:
        """That of batches as large as this."""
        return self.by_octave.setdefault(active.bit_length(), Budget(self.share))

    def state(self) -> dict[str, Any]:
        """Plain values, for `restored`."""
        return {"share": self.share, "by_octave": {str(k): asdict(budget) for k, budget in self.by_octave.items()}}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> Purses:
        return Purses(state["share"], {int(k): Budget(**budget) for k, budget in state["by_octave"].items()})


@dataclass
class Probe:
    """A probe under way; a trial is one of a drafter about which nothing is known."""

    plan: int
    left: int
    trial: bool = False


def why(plan: Plan, rounds: int, rate: float, error: float, idle: int) -> str:
    """For a person: a probe of so many rounds of a plan that promises `rate` tokens/s, whose drafter was last seen `idle` rounds ago."""
    return f"probe of {name_of(plan)} for {rounds} rounds: {rate:.4g} tokens/s within {error:.0%}, its drafter last ran {idle} rounds ago"
