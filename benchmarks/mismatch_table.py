"""Writes the result of `mismatch.py` as Markdown, and its reward curves as a picture beside it.

python benchmarks/mismatch_table.py benchmarks/results/mismatch.json > docs/mismatch.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from short_runs import gain
from short_table import Runs, mean, recorded, rewards

PICTURE = Path("docs/mismatch.svg")
# of a normal variable, its 97.5th and its 80th percentile
LEVEL_05, POWER_08 = 1.96, 0.84


def main(path: str) -> None:
    result = recorded(path)
    settings = next(iter(result.named.values()))[0]["settings"]
    shared = ", ".join(f"`{setting}`" for setting in settings if "correction" not in setting)
    print("# Learning from another policy's rollouts\n")
    print(
        f"GRPO on the demo model; seeds of each way: {result.seeds}; one thread, {result.budget:,} generated tokens a run; {shared}; {result.items} held-out items at "
        f"temperature 1, before and after, by the trained policy itself. {result.where}. Written by `benchmarks/mismatch.py`.\n"
    )
    print(
        "The mismatch is the mean of |log-probability by the trainer's policy before the step less that by the policy that sampled|, nats a token. Gain: "
        "mean over the seeds ± its standard error. Against matched: the gain's difference to rollouts of the policy's own weights; against none: to the same rollouts "
        f"without correction. Such a difference is seen four times in five (two-sided, 5 %) where it is {_seen(result.named):.0f} points or more.\n"
    )
    print(
        "| rollouts | correction | mismatch | accuracy after, by seed | gain | against matched | against none | worst drop |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in result.named.items():
        source, way = name.split(", ")
        none = result.named.get(f"{source}, none", []) if way != "none" else []
        print(_row(source, way, runs, result.named["matched, none"] if source != "matched" else [], none))
    print(f"\n![Reward over tokens]({PICTURE.name})")
    rewards(result, PICTURE)


def _seen(named: Mapping[str, Runs]) -> float:
    """Points of accuracy between two ways that a test at 5 % has a power of 0.8 for: 2.8 standard errors, by the mean variance of a way's gain."""
    variance = sum(gain(runs)[1] ** 2 for runs in named.values()) / len(named)
    return 100 * (POWER_08 + LEVEL_05) * (2 * variance) ** 0.5


def _row(source: str, way: str, runs: Runs, matched: Runs, none: Runs) -> str:
    gained, error = gain(runs)
    cells = (
        source, f"`{way}`", f"{mean(runs, 'mismatch'):.3f}", ", ".join(f"{100 * run['accuracy_after']:.1f}" for run in runs) + " %",
        f"{100 * gained:+.1f} ± {100 * error:.1f}", _against(runs, matched), _against(runs, none), f"{max(run['worst_drop'] for run in runs):.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _against(runs: Runs, others: Runs) -> str:
    if not others:
        return ""
    (gained, error), (other, its) = gain(runs), gain(others)
    return f"{100 * (gained - other):+.1f} ± {100 * (error**2 + its**2) ** 0.5:.1f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
