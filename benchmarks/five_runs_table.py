"""Writes the result of `five_runs.py` as Markdown, and what was learned as a picture beside it.

python benchmarks/five_runs_table.py benchmarks/results/five_runs.json > docs/five_runs.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picture import Panel, mean_curve, panels
from short_runs import WINDOW

PICTURE = Path("docs/five_runs.svg")


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    runs, at = result["runs"], result["provenance"]
    made_at = dict.fromkeys(run["commit"] for run in runs)
    commits = ", ".join(f"`{name[:10]}`" for name in made_at)
    print(f"# {', '.join(run['kind'] for run in runs)}: one run of each\n")
    print(
        f"One seed each, one thread of {at['processor']}; commits {commits}; `{path}`. Written by `benchmarks/five_runs.py`, which has the settings: the "
        "examples as they ship, but for what stands below the table. Accuracy is of held-out items, at temperature 1, before the first step of RL and after "
        "the last, ± its standard error.\n"
    )
    print(
        "| run | example | steps | tokens | accuracy before | after | in standard errors | reward, first to last 5 steps | CPU time | as plain decoding |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        print(_row(run))
    print(f"\n![Rewards and held-out accuracies over steps]({PICTURE.name})\n")
    for run in runs:
        if run["settings"]:
            print(f"- {run['kind']}: {', '.join(f'`{setting}`' for setting in run['settings'])}")
    print("\n## Killed and started again\n")
    print(
        "Each made small, of its example as it was at the commit given, run once as it is, and once more and killed (`SIGKILL`) when the step given was on the disk, which is after the last checkpoint; then "
        "started again with the same command. Compared are all rollouts as they were written (tokens, log-probabilities, entropies, rewards) and every tensor of the last "
        "checkpoint (weights, moments, a critic's), bit by bit.\n"
    )
    print("| run | commit | signal | killed after step | steps | tokens | rollouts | last checkpoint |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        print(_killed(run["kind"], run["killed"]))
    panels(
        PICTURE,
        [_panel(run) for run in runs],
        f"step; line: mean reward of {WINDOW} steps, dots: held-out accuracy ± its standard error",
    )


def _row(run: Mapping[str, Any]) -> str:
    curve, first, last = run["curve"], run["accuracy"][0], run["accuracy"][-1]
    gained, error = last["accuracy"] - first["accuracy"], (last["se"] ** 2 + first["se"] ** 2) ** 0.5
    reward = curve["reward/mean"]
    cells = (
        run["kind"], f"`{Path(run['example']).name}`", f"{len(reward)}", f"{curve['tokens/total'][-1]:,.0f}", _accuracy(first), _accuracy(last), f"{gained / error:.1f}",
        f"{_mean(reward[:WINDOW]):.2f} to {_mean(reward[-WINDOW:]):.2f}", f"{run['cpu_s']:.0f} s",
        f"{run['identical_steps']:.0f} of {run['compared_steps']} steps" if run["compared_steps"] else "not looked",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _accuracy(at: Mapping[str, float]) -> str:
    return f"{100 * at['accuracy']:.1f} % ± {100 * at['se']:.1f}"


def _killed(kind: str, run: Mapping[str, Any]) -> str:
    rollouts = f"the same, {run['steps']} files" if run["same_rollouts"] else "**not the same**"
    state = f"the same, {run['tensors']} tensors" if run["same_state"] else "**not the same**"
    return f"| {kind} | `{run['commit'][:10]}` | {run['signal']} | {run['killed_after_step']} | {run['steps']} | {run['tokens']:,.0f} | {rollouts} | {state} |"


def _panel(run: Mapping[str, Any]) -> Panel:
    reward = run["curve"]["reward/mean"]
    curve = {"step": list(range(1, len(reward) + 1)), "reward": reward}
    dots = [(at["step"], at["accuracy"], at["se"]) for at in run["accuracy"]]
    return Panel(run["kind"], mean_curve([curve], "reward", "step", WINDOW), dots)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
