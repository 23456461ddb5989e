"""Writes the result of `mismatch.py` as Markdown, and its reward curves as a picture beside it.

python benchmarks/mismatch_table.py benchmarks/results/mismatch.json > docs/mismatch.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picture import curves, mean_curve
from short_runs import WINDOW, by_name, gain

PICTURE = Path("docs/mismatch.svg")


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    named = by_name(result["runs"])
    at, seeds = result["provenance"], max(len(runs) for runs in named.values())
    first = result["runs"][0]
    shared = ", ".join(f"`{setting}`" for setting in first["settings"] if "correction" not in setting)
    print("# Learning from another policy's rollouts\n")
    print(
        f"GRPO on the demo model, {seeds} seeds a way, one thread, {result['budget']:,} generated tokens a run; {shared}; {first['items']} held-out items at "
        f"temperature 1, before and after, by the trained policy itself. {at['processor']}; commit `{str(at['commit'])[:10]}`; `{path}`. Written by "
        "`benchmarks/mismatch.py`.\n"
    )
    print(
        "The mismatch is the mean of |log-probability by the trainer's policy before the step less that by the policy that sampled|, nats a token. Gain: "
        "mean over the seeds ± its standard error. Against none: the gain's difference to the same rollouts without correction.\n"
    )
    print(
        "| rollouts | correction | mismatch | accuracy after, by seed | gain | against none | worst drop |\n|---|---|---|---|---|---|---|"
    )
    for name, runs in named.items():
        source, way = name.split(", ")
        none = named.get(f"{source}, none", []) if way != "none" else []
        print(_row(source, way, runs, none))
    print(f"\n![Reward over tokens]({PICTURE.name})")
    lines = {
        name: mean_curve([run["curve"] for run in runs], "reward/mean", "tokens/total", WINDOW)
        for name, runs in named.items()
    }
    curves(PICTURE, f"Mean reward of {WINDOW} steps, mean of {seeds} seeds", "generated tokens", "reward", lines)


def _row(source: str, way: str, runs: Sequence[Mapping[str, Any]], none: Sequence[Mapping[str, Any]]) -> str:
    mean, error = gain(runs)
    against = ""
    if none:
        other, its = gain(none)
        against = f"{100 * (mean - other):+.1f} ± {100 * (error**2 + its**2) ** 0.5:.1f}"
    cells = (
        source, f"`{way}`", f"{sum(run['mismatch'] for run in runs) / len(runs):.3f}",
        ", ".join(f"{100 * run['accuracy_after']:.1f}" for run in runs) + " %", f"{100 * mean:+.1f} ± {100 * error:.1f}", against,
        f"{max(run['worst_drop'] for run in runs):.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
