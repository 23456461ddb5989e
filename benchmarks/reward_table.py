"""Writes the result of `reward_curves.py` as a page of the documentation, and its curves as a picture.

python benchmarks/reward_table.py benchmarks/results/reward_curves.json --picture docs/reward_curves.svg > docs/reward_curves.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t

from respec.report.surprise import Surprise, recorded

Run = dict[str, Any]
# How far two ways may lie apart and still be called the same: five hundredths of the reward, and of accuracy.
MARGIN = 0.05
LEVEL = 0.05
LAST = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    runs: list[Run] = result["runs"]
    at = result["provenance"]
    print("# Reward curves, by way to draft and to verify\n")
    print(
        f"What it means: [Does it spoil my run?](does_it_spoil_my_run.md). Here is what is learned by the demo in {result['steps']} steps of GRPO "
        f"({result['prompts_per_step']} prompts a step, 8 completions each, learning rate {result['lr']:g}), with an EAGLE-3 head that drafts 4 deep, under "
        f"four ways to draft and three ways to verify. `lenient` is a verifier that was broken on purpose: it accepts a draft with "
        f"min(1, {result['lenience']:g} p / q) where `rejection` does with min(1, p / q), and says all the same that the token is the policy's. "
        f"One thread; commit `{str(at['commit'])[:10]}`; `{given.result}`. Written by `benchmarks/reward_table.py`.\n"
    )
    if given.picture is not None:
        picture(runs, result["lenience"], given.picture)
        print(f"![Reward by step under plain decoding, exact and lenient verification]({given.picture.name})\n")
    _matching(runs)
    _cells(runs)
    _equivalence(runs)
    _alarms(runs)


def _matching(runs: Sequence[Run]) -> None:
    """Whether the ways to draft gave the same rollouts and weights under `matching`."""
    print("## `matching`: the same run\n")
    for seed in sorted({run["seed"] for run in runs}):
        same = [run for run in runs if run["verifier"] == "matching" and run["seed"] == seed]
        if len(same) < 2:
            continue
        rollouts = {tuple(step["rollouts"] for step in run["curve"]) for run in same}
        weights = {run["weights"] for run in same}
        tokens = sum(step["rollout/tokens"] for step in same[0]["curve"])
        print(
            f"Seed {seed}, {', '.join(run['way'] for run in same)}: {_count(rollouts, 'sequence of rollouts')} "
            f"({tokens:.0f} tokens, compared with their log-probabilities, step by step), {_count(weights, 'last policy')} (compared bit by bit).\n"
        )


def _count(distinct: set[Any], what: str) -> str:
    return f"one {what}" if len(distinct) == 1 else f"**{len(distinct)} different {what}s**"


def _cells(runs: Sequence[Run]) -> None:
    print("## What was learned\n")
    print(
        f"Means over seeds with 95 % intervals (Student's t). Rewards are those of the run's own rollouts, so under `lenient` of what the broken "
        f"verifier made; held-out accuracy is the last policy's own, by plain decoding of {runs[0]['held_out']['items']} rows.\n"
    )
    print(
        f"| verifier | way | seeds | reward, all steps | reward, last {LAST} steps | held-out accuracy | entropy, last {LAST} steps | tokens a round |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (verifier, way), chosen in _by_cell(runs).items():
        columns = [
            _band(map(_whole, chosen)),
            _band(_tail(run, "reward/mean") for run in chosen),
            _band(map(_accuracy, chosen)),
            _band(_tail(run, "rollout/entropy") for run in chosen),
            f"{np.mean([step['rollout/accepted_length'] for run in chosen for step in run['curve']]):.2f}",
        ]
        print(f"| {verifier} | {way} | {len(chosen)} | {' | '.join(columns)} |")


def _equivalence(runs: Sequence[Run]) -> None:
    print("\n## Against plain decoding\n")
    print(
        f"Differences to plain decoding, seed by seed (the same prompts in the same order, the same held-out rows), with 95 % intervals. `same` is two "
        f"one-sided t tests at level {LEVEL} that the difference is within ±{MARGIN}; its power is the chance that it says so where there is no "
        "difference, given the spread that was seen.\n"
    )
    print(
        "| verifier | way | reward, all steps | same? | power | held-out accuracy | same? | power |\n|---|---|---|---|---|---|---|---|"
    )
    cells = _by_cell(runs)
    plain = {run["seed"]: run for run in cells["matching", "plain"]}
    for verifier in ("rejection", "lenient"):
        ways = {way: chosen for (v, way), chosen in cells.items() if v == verifier}
        if not ways:
            continue
        seeds = sorted(set.intersection(set(plain), *({run["seed"] for run in chosen} for chosen in ways.values())))
        for way in (*ways, "mean of the ways"):
            columns = []
            for figure in (_whole, _accuracy):
                of = [ways[way]] if way in ways else list(ways.values())
                gaps = [
                    np.mean([figure(r) for chosen in of for r in chosen if r["seed"] == seed]) - figure(plain[seed])
                    for seed in seeds
                ]
                same, power = equivalent(gaps)
                columns += [_band(gaps, "+"), "yes" if same else "not shown", f"{power:.2f}"]
            print(f"| {verifier} | {way} | {' | '.join(columns)} |")


def equivalent(gaps: Sequence[float]) -> tuple[bool, float]:
    """Schuirmann's (1987) two one-sided tests that the mean of the gaps is within ±MARGIN, and their power where it is 0.

    The power is P(|T| < MARGIN / se - t) of Student's t, se taken as known: an approximation.
    """
    error = float(np.std(gaps, ddof=1)) / len(gaps) ** 0.5
    critical = t.ppf(1 - LEVEL, len(gaps) - 1)
    inside = abs(float(np.mean(gaps))) + critical * error < MARGIN
    room = MARGIN / error - critical if error else np.inf
    return inside, max(0.0, 2 * float(t.cdf(room, len(gaps) - 1)) - 1)


def _alarms(runs: Sequence[Run]) -> None:
    print("\n## Would I have been told?\n")
    print(
        "Each step a run adds up how much more surprising its tokens were than the policy's entropy says they should be (`report/surprise.py`): 0 in "
        "expectation wherever tokens are the policy's own draws. It says so in one line at six standard errors.\n"
    )
    print(
        "| verifier | way | tokens | surprise less entropy, nats a token | in standard errors | runs that said so | at step |"
    )
    print("|---|---|---|---|---|---|---|")
    for (verifier, way), chosen in _by_cell(runs).items():
        total = sum((recorded(step) for run in chosen for step in run["curve"]), Surprise())
        said = [run for run in chosen if run["alarm"]]
        steps = sorted(first for run in said if (first := _first_alarm(run)) is not None)
        when = f"{steps[0]} to {steps[-1]}" if steps else "–"
        print(
            f"| {verifier} | {way} | {total.tokens:.0f} | {total.mean:+.4f} | {total.z:+.1f} | {len(said)} of {len(chosen)} | {when} |"
        )
    lines = [line for run in runs for line in run["alarm"]]
    if lines:
        print(f"\nThe line, for example:\n\n    {lines[0]}")


def _first_alarm(run: Run) -> int | None:
    seen = Surprise()
    for step in run["curve"]:
        seen += recorded(step)
        if seen.alarming:
            return step["step"]
    return None


def picture(runs: Sequence[Run], lenience: float, path: Path) -> None:
    """Reward by step, smoothed over five: plain decoding beside the ways of each verifier, bands of 95 % over seeds."""
    cells, figure = _by_cell(runs), Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, verifier in zip(axes, ("rejection", "lenient"), strict=True):
        for (v, way), chosen in cells.items():
            if way != "plain" and v != verifier:
                continue
            curves = np.array(
                [np.convolve([s["reward/mean"] for s in run["curve"]], np.full(5, 0.2), mode="valid") for run in chosen]
            )
            mean, steps = curves.mean(0), np.arange(3, 3 + curves.shape[1])
            line = axis.plot(
                steps,
                mean,
                label="plain decoding" if way == "plain" else way,
                color="black" if way == "plain" else None,
            )
            if len(chosen) > 1:
                half = t.ppf(0.975, len(chosen) - 1) * curves.std(0, ddof=1) / len(chosen) ** 0.5
                axis.fill_between(steps, mean - half, mean + half, alpha=0.15, color=line[0].get_color(), linewidth=0)
        axis.set_xlabel("step")
        rule = "min(1, p / q), exact" if verifier == "rejection" else f"min(1, {lenience:g} p / q), broken on purpose"
        axis.set_title(f"accepts with {rule}", fontsize=10)
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("mean reward")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def _by_cell(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    order = [(v, w) for v in ("matching", "rejection", "lenient") for w in ("plain", "frozen", "uniform", "reward")]
    cells = {cell: [run for run in runs if (run["verifier"], run["way"]) == cell] for cell in order}
    return {cell: chosen for cell, chosen in cells.items() if chosen}


def _whole(run: Run) -> float:
    return float(np.mean([step["reward/mean"] for step in run["curve"]]))


def _tail(run: Run, metric: str) -> float:
    return float(np.mean([step[metric] for step in run["curve"][-LAST:]]))


def _accuracy(run: Run) -> float:
    return run["held_out"]["accuracy"]


def _band(values: Iterable[float], sign: str = "") -> str:
    numbers = list(values)
    mean = float(np.mean(numbers))
    if len(numbers) < 2:
        return f"{mean:{sign}.3f}"
    half = t.ppf(0.975, len(numbers) - 1) * np.std(numbers, ddof=1) / len(numbers) ** 0.5
    return f"{mean:{sign}.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
