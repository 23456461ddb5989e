"""Who says how the next decode round is to be drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from respec.types import Load, Plan, RoundRecord


class Planner(Protocol):
    """Asked before every round, told after it. It sees loads and times, never the model."""

    @property
    def predicted(self) -> float:
        """Tokens/s that the plan it gave last promises; 0 where nothing is predicted."""
        ...

    def plan(self, load: Load) -> Plan: ...

    def observe(self, record: RoundRecord) -> None: ...


@dataclass(frozen=True)
class StaticPlanner:
    """One plan, whatever comes."""

    always: Plan
    predicted: float = 0.0

    def plan(self, load: Load) -> Plan:
        return self.always

    def observe(self, record: RoundRecord) -> None:
        """Nothing: it has decided."""
