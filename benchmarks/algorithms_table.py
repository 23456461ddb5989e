"""Writes the result of `algorithms.py` as Markdown, and its reward curves as a picture beside it.

python benchmarks/algorithms_table.py benchmarks/results/algorithms.json > docs/algorithms.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picture import curves, mean_curve
from short_runs import SPIKE, WINDOW, by_name, gain

PICTURE = Path("docs/algorithms.svg")


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    named = by_name(result["runs"])
    at, seeds = result["provenance"], max(len(runs) for runs in named.values())
    items = result["runs"][0]["items"]
    print("# The named algorithms, side by side\n")
    print(
        f"The demo model on chains of sums, {seeds} seeds each, one thread, {result['budget']:,} generated tokens a run (the step that passes it is the "
        f"last); {items} held-out items at temperature 1, before and after. {at['processor']}; commit `{str(at['commit'])[:10]}`; `{path}`. "
        f"Written by `benchmarks/algorithms.py`, which has the settings.\n"
    )
    print(
        "Gain: mean over the seeds ± its standard error (of the items drawn, or of the seeds' spread where that is more). Worst drop: how far the mean "
        f"reward of {WINDOW} steps fell below its best before, the worst seed. Spikes: steps whose gradient is not finite or over {SPIKE:g} times the run's "
        "median. Entropy: nats a token, of the last three steps.\n"
    )
    print(
        "| algorithm | accuracy before | after, by seed | gain | in standard errors | worst drop | spikes | entropy | steps | CPU time |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, runs in named.items():
        print(_row(name, runs))
    print(f"\n![Reward over tokens]({PICTURE.name})\n")
    print("Settings beside the preset and `examples/demo.toml`:\n")
    for name, runs in named.items():
        print(f"- `{name}`: {', '.join(f'`{setting}`' for setting in runs[0]['settings'][1:])}")
    lines = {
        name: mean_curve([run["curve"] for run in runs], "reward/mean", "tokens/total", WINDOW)
        for name, runs in named.items()
    }
    curves(PICTURE, f"Mean reward of {WINDOW} steps, mean of {seeds} seeds", "generated tokens", "reward", lines)


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    mean, error = gain(runs)
    before = sum(run["accuracy_before"] for run in runs) / len(runs)
    after = ", ".join(f"{100 * run['accuracy_after']:.1f}" for run in runs)
    failed = sum(run["failed"] is not None for run in runs)
    cells = (
        f"`{name}`", f"{100 * before:.1f} %", f"{after} %", f"{100 * mean:+.1f} ± {100 * error:.1f}", f"{mean / error:.1f}",
        f"{max(run['worst_drop'] for run in runs):.2f}", f"{100 * max(run['spikes'] for run in runs):.0f} %" + (f", {failed} stopped" if failed else ""),
        f"{sum(run['entropy_after'] for run in runs) / len(runs):.3f}", f"{sum(run['steps'] for run in runs) / len(runs):.0f}",
        f"{sum(run['cpu_s'] for run in runs) / len(runs):.0f} s",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
