"""A controller's decisions as a page for a person: what the load was, what was chosen, what else was promised, and why."""

from __future__ import annotations

from collections.abc import Sequence

from respec.speculation.decision import Decision
from respec.types import Plan

HEADER = ("round", "active", "waiting", "context", "weights", "plan", "predicted, tokens/s", "why")


def explain(decisions: Sequence[Decision]) -> str:
    """One row a decision, under a header; below, how much time probing took."""
    if not decisions:
        return "No decision was recorded: the plan was never asked for."
    rows = [HEADER, *map(_row, decisions)]
    # the last column is a sentence, and may run on
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in [*widths, len(HEADER[-1])]))
    last = decisions[-1]
    share = last.probed_s / last.elapsed_s if last.elapsed_s else 0.0
    lines.append(
        f"{len(decisions)} decisions; probing took {last.probed_s:.2f} of {last.elapsed_s:.2f} s ({share:.2%})."
    )
    return "\n".join(lines)


def _row(decision: Decision) -> tuple[str, ...]:
    best = ", ".join(f"{_short(candidate.plan)} {candidate.goodput:.3g}" for candidate in decision.best)
    version = f"{decision.version.policy}/{decision.version.drafter}"
    load = (str(decision.round), str(decision.active), str(decision.waiting), f"{decision.context:.0f}", version)
    return (*load, _short(decision.chosen), best, decision.reason)


def _short(plan: Plan) -> str:
    if not plan.n:
        return "off"
    return f"{plan.drafter} s={plan.s}" + (f" t={plan.t} n={plan.n}" if plan.t > 1 else "")
