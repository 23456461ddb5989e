"""What the pages of short runs have in common: the recorded result by name, where it was recorded, and its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picture import curves, mean_curve
from short_runs import WINDOW, by_name

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """The runs of one recording by their names, and what a page says of all of them."""

    named: Mapping[str, Runs]
    budget: int
    seeds: int
    items: int
    where: str


def recorded(path: str) -> Recorded:
    result = json.loads(Path(path).read_text())
    named, at = by_name(result["runs"]), result["provenance"]
    commits = ", ".join(f"`{name[:10]}`" for name in dict.fromkeys(str(run["commit"]) for run in result["runs"]))
    where = f"{at['processor']}; commit {commits}; `{path}`"
    return Recorded(named, result["budget"], max(map(len, named.values())), result["runs"][0]["items"], where)


def rewards(result: Recorded, to: Path) -> None:
    """Draws the mean reward of WINDOW steps over generated tokens, a line a name."""
    lines = {
        name: mean_curve([run["curve"] for run in runs], "reward/mean", "tokens/total", WINDOW)
        for name, runs in result.named.items()
    }
    title = f"Mean reward of {WINDOW} steps, mean of {result.seeds} seeds"
    curves(to, title, "generated tokens", "reward", lines)


def mean(runs: Runs, key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)
