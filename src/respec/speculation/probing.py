"""Probes of plans that are not believed best: how much time they may take, and the one under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Budget:
    """Seconds of probing allowed and spent."""

    share: float
    elapsed_s: float = 0.0
    spent_s: float = 0.0

    def allows(self, seconds: float) -> bool:
        return self.spent_s + seconds <= self.share * (self.elapsed_s + seconds)


@dataclass
class Probe:
    """A probe under way."""

    plan: int
    left: int
