"""Writes the result of `algorithms.py` as Markdown, and its reward curves as a picture beside it.

python benchmarks/algorithms_table.py benchmarks/results/algorithms.json > docs/algorithms.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from short_runs import SPIKE, WINDOW, gain
from short_table import Runs, mean, recorded, rewards

PICTURE = Path("docs/algorithms.svg")
SURE = 3


def main(path: str) -> None:
    result = recorded(path)
    print("# The named algorithms, side by side\n")
    print(
        f"The demo model on chains of sums; seeds of each: {result.seeds}; one thread, {result.budget:,} generated tokens a run (the step that passes it is the "
        f"last); {result.items} held-out items at temperature 1, before and after. {result.where}. Written by `benchmarks/algorithms.py`.\n"
    )
    clear = sum(gained > SURE * error for gained, error in map(gain, result.named.values()))
    print(f"**{clear} of {len(result.named)} gain more than {SURE} standard errors.**\n")
    print(
        "Gain: mean over the seeds ± its standard error (of the items drawn, or of the seeds' spread where that is more). Worst drop: how far the mean "
        f"reward of {WINDOW} steps fell below its best before, the worst seed. Spikes: steps whose gradient is not finite or over {SPIKE:g} times the run's "
        "median, the worst seed. Entropy: nats a token, of the last three steps. CPU time: of the process, generation, training and evaluation together.\n"
    )
    print(
        "| algorithm | accuracy before | after, by seed | gain | in standard errors | worst drop | spikes | entropy | steps | tokens trained | CPU time |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, runs in result.named.items():
        print(_row(name, runs))
    print(f"\n![Reward over tokens]({PICTURE.name})\n")
    settings = {name: runs[0]["settings"][1:] for name, runs in result.named.items()}
    shared = [setting for setting in settings["grpo"] if all(setting in own for own in settings.values())]
    print(f"Settings beside the preset and `examples/demo.toml`: {_listed(shared)}; and\n")
    for name, own in settings.items():
        if further := [setting for setting in own if setting not in shared]:
            print(f"- `{name}`: {_listed(further)}")
    rewards(result, PICTURE)


def _listed(settings: Sequence[str]) -> str:
    return ", ".join(f"`{setting}`" for setting in settings)


def _row(name: str, runs: Runs) -> str:
    gained, error = gain(runs)
    after = ", ".join(f"{100 * run['accuracy_after']:.1f}" for run in runs)
    failed = sum(run["failed"] is not None for run in runs)
    cells = (
        f"`{name}`", f"{100 * mean(runs, 'accuracy_before'):.1f} %", f"{after} %", f"{100 * gained:+.1f} ± {100 * error:.1f}", f"{gained / error:.1f}",
        f"{max(run['worst_drop'] for run in runs):.2f}", f"{100 * max(run['spikes'] for run in runs):.0f} %" + (f", {failed} stopped" if failed else ""),
        f"{mean(runs, 'entropy_after'):.3f}", f"{mean(runs, 'steps'):.0f}", f"{mean(runs, 'trained') / 1000:,.0f} k", f"{mean(runs, 'cpu_s'):.0f} s",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
