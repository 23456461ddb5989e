"""Who says how the next decode round is to be drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from respec.types import Load, Plan, RoundRecord


class Planner(Protocol):
    """Asked before every round, told after it. It sees loads and times, never the model."""

    def plan(self, load: Load) -> Plan: ...

    def observe(self, record: RoundRecord) -> None: ...


@dataclass(frozen=True)
class StaticPlanner:
    """One plan, whatever comes."""

    always: Plan

    def plan(self, load: Load) -> Plan:
        return self.always

    def observe(self, record: RoundRecord) -> None:
        """Nothing: it has decided."""
