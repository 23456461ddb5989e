"""What a certificate is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """One check of one subject. `sentence` says in plain words what was seen; `figures` are its numbers, for a program."""

    check: str
    subject: str
    outcome: Outcome
    sentence: str
    figures: Mapping[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """All findings about one model and engine. `circumstances` are what they hold for: machine, versions, dtype, threads."""

    model: str
    engine: str
    circumstances: Mapping[str, Any]
    findings: tuple[Finding, ...]
    wall_s: float

    @property
    def passed(self) -> bool:
        """Something was checked, and nothing of it failed."""
        outcomes = {finding.outcome for finding in self.findings}
        return "passed" in outcomes and "failed" not in outcomes

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is no number becomes None, since JSON has no word for it."""
        tree = {"passed": self.passed, **asdict(self)}
        for finding in tree["findings"]:
            finding["figures"] = {name: value if _finite(value) else None for name, value in finding["figures"].items()}
        return tree


def _finite(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)
