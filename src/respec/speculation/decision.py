"""Why a plan was chosen: one record each time it changes, for the run folder and for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from respec.speculation.solver import Candidate
from respec.types import Plan, Version

Kind = Literal["start", "switch", "off", "probe", "return", "guard", "share", "sentinel"]


@dataclass(frozen=True)
class Decision:
    """Made by the controller when the plan changes, or depths are shared out, and by the sentinel for an alarm; read by the report and by `explain`.

    `round` counts the rounds of the controller's life. Load: `active`, `waiting`, `context`, `version`. Estimates for the chosen plan:
    `accept_D` by depth, `plain` the predicted rate of plain decoding, tokens a second. `best` are the three plans with the highest
    predicted goodput. `elapsed_s` and `probed_s` are the seconds of all rounds and of probes so far.
    """

    round: int
    kind: Kind
    active: int
    waiting: int
    context: float
    version: Version
    chosen: Plan
    best: tuple[Candidate, ...]
    plain: float
    accept_D: tuple[float, ...]
    elapsed_s: float
    probed_s: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Decision:
        return Decision(
            **{
                **data,
                "version": Version(**data["version"]),
                "chosen": Plan(**data["chosen"]),
                "best": tuple(Candidate(**{**item, "plan": Plan(**item["plan"])}) for item in data["best"]),
                "accept_D": tuple(data["accept_D"]),
            }
        )


def name_of(plan: Plan) -> str:
    """A plan in words."""
    if not plan.n:
        return "plain decoding"
    tree = f", {plan.n} nodes of branching {plan.t}" if plan.t > 1 else ""
    return f"{plan.drafter} to depth {plan.s}{tree}"
