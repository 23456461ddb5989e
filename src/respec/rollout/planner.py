"""Who says how the next decode round is to be drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from respec.types import Cut, DraftCounts, Leads, Load, Mode, Plan, Rollout, RoundRecord


class Planner(Protocol):
    """Asked before every round, told after it. It sees loads and times, never the model."""

    @property
    def predicted(self) -> float:
        """Tokens/s that the plan it gave last promises; 0 where nothing is predicted."""
        ...

    def plan(self, load: Load) -> Plan: ...

    def observe(self, record: RoundRecord) -> None: ...


@runtime_checkable
class DepthPlanner(Planner, Protocol):
    """A planner that may tell the sequences of a batch apart, from how long others were."""

    def depths(self) -> Sequence[int] | None:
        """How deep each active sequence may draft under the plan given last, in the order of that plan's load. None: as deep as the plan."""
        ...

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """A rollout has ended; these are all of its completions, in canonical order."""
        ...


class Cutter(Protocol):
    """Who says how sure drafted tokens must be, and learns how sure they were."""

    def cut(self) -> Cut | None:
        """Where drafts under the plan given last are to be cut; None: nowhere, and nothing is to be learned."""
        ...

    def judged(self, leads: Sequence[Leads]) -> None:
        """What became of the drafts of a round with a cut: the plan's drafter's, then, row by row of the same sequences, those made beside."""
        ...


@runtime_checkable
class CuttingPlanner(Planner, Protocol):
    """A planner that may have drafts cut short of tokens that are not worth a row."""

    @property
    def cutter(self) -> Cutter | None: ...


@runtime_checkable
class ShadowPlanner(Planner, Protocol):
    """A planner that wants to know what idle look-up drafters would be worth, as decoding goes on."""

    @property
    def shadow_depth(self) -> int:
        """How deep it would have them draft; 0: it does not want to know."""
        ...

    def shadow(self, drafter: str, counts: DraftCounts) -> None:
        """What an idle drafter's guesses of late came to."""
        ...


@dataclass(frozen=True)
class StaticPlanner:
    """One plan, whatever comes."""

    always: Plan
    predicted: float = 0.0

    def plan(self, load: Load) -> Plan:
        return self.always

    def observe(self, record: RoundRecord) -> None:
        """Nothing: it has decided."""


@dataclass(frozen=True)
class OneDepth:
    """Any planner, as one that never tells sequences apart."""

    planner: Planner

    @property
    def predicted(self) -> float:
        return self.planner.predicted

    def plan(self, load: Load) -> Plan:
        return self.planner.plan(load)

    def observe(self, record: RoundRecord) -> None:
        self.planner.observe(record)

    def depths(self) -> None:
        """As deep as the plan."""

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: lengths do not matter to it."""


def planner_of(plan: Plan | Planner) -> DepthPlanner:
    """What the engine asks: a plan for every round, or a planner of either kind."""
    if isinstance(plan, Plan):
        return OneDepth(StaticPlanner(plan))
    return plan if isinstance(plan, DepthPlanner) else OneDepth(plan)


def cutter_of(planner: Planner, mode: Mode) -> Cutter | None:
    """Who says where drafts are cut, if anybody: in `rejection` whether a token is looked at may not depend on how it was drawn, and old answers of
    `lossy` are not drafted by a race."""
    return planner.cutter if mode == "matching" and isinstance(planner, CuttingPlanner) else None
