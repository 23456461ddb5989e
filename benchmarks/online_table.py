"""Writes results of `benchmarks/online_learner.py` as Markdown, and the accepted lengths over the steps as a picture.

python benchmarks/online_table.py benchmarks/results/online_demo.json [--timing benchmarks/results/online_timing_demo.json] [--picture docs/online_learner.svg] > docs/online_learner.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

SHOWN = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--other", type=Path, action="append", default=[], help="the same of another model")
    parser.add_argument("--timing", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    print(f"# A drafter that follows its policy: {Path(result['model']).name}\n")
    print(f"{_where(result, given.result)}\n")
    if given.picture is not None:
        _picture(result, given.picture)
        print(f"![Accepted length while the policy learns, by head]({given.picture.name})\n")
    _lengths(result)
    if given.timing is not None:
        _times(json.loads(given.timing.read_text()), given.timing)
    for path in given.other:
        other = json.loads(path.read_text())
        print(f"\n## {Path(other['model']).name}\n\n{_where(other, path)}\n")
        _lengths(other)


def _measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps at which all heads were measured."""
    return [row for row in result["rows"] if len(row["accepted_length"]) > 1]


def _lengths(result: dict[str, Any]) -> None:
    rows = _measured(result)
    count = min(SHOWN, len(rows))
    shown = [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]
    names = list(rows[0]["accepted_length"])
    print("Accepted length (tokens a round and sequence) on each step's rollouts, the same tokens for all heads:\n")
    print(
        "| head | "
        + " | ".join(f"step {row['step']}" for row in shown)
        + " | held out, at the end | of the reference |"
    )
    reference, share = result.get("reference"), result.get("of_reference", {})
    print("|---|" + "---|" * (len(shown) + 2))
    for name in names:
        lengths = " | ".join(f"{row['accepted_length'][name]:.2f}" for row in shown)
        print(
            f"| `{name}` | {lengths} | {result['held_out_accepted_length'][name]:.2f} | {format(share[name], '.3f') if share else '–'} |"
        )
    if reference:
        print(
            f"| reference | {' | '.join('–' for _ in shown)} | {reference['accepted_length']:.2f} | 1 |\n\n"
            f"The reference learned by `{reference['loss']}` from {result['reference_data_tokens']} tokens of the last policy's rollouts, "
            f"{result['reference_data_tokens'] / _mean([row['tokens'] for row in result['rows']]):.0f} times those of one update, for {reference['steps']} steps; "
            "steps were doubled until that gained less than half a percent."
        )
    print(
        "\nOverlap Σ min(p, q) at depth 1 on a step's rollouts by the head of the step before, and what learning from them adds; means:\n"
    )
    print("| head | before | gained |\n|---|---|---|")
    for name in rows[0]["overlap"]:
        steps = [row["overlap"][name] for row in result["rows"]]
        columns = ([step[key] for step in steps if key in step] for key in ("overlap", "gained"))
        print(f"| `{name}` | " + " | ".join(f"{_mean(column):.4f}" for column in columns) + " |")


def _times(result: dict[str, Any], path: Path) -> None:
    print(f"\n## What it costs\n\n{_where(result, path)}\n")
    print(
        "| way | step | generation | the policy's update | waited for the learner | its update |\n|---|---|---|---|---|---|"
    )
    for way in dict.fromkeys(row["way"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["way"] == way]
        keys = ("step_s", "generation_s", "training_s", "waited_s", "update_s")
        print(f"| {way} | " + " | ".join(f"{_mean([row[key] for row in rows]):.2f} s" for key in keys) + " |")
    print("\nTime by the token, block by block:\n\n| ratio | median | least | most |\n|---|---|---|---|")
    for name, ratio in result["ratios"].items():
        print(f"| {name} | {ratio['median']:.3f} | {ratio['least']:.3f} | {ratio['most']:.3f} |")


def _where(result: dict[str, Any], path: Path) -> str:
    at = result["provenance"]
    return (
        f"{at['threads']} threads of {at['processor']} ({at['cores']} cores); settings {', '.join(f'`{s}`' for s in result['settings'])}; "
        f"commit `{str(at['commit'])[:10]}`; `{path}`."
    )


def _picture(result: dict[str, Any], path: Path) -> None:
    figure, rows = Figure(figsize=(7, 3.6), layout="constrained"), _measured(result)
    axis = figure.subplots()
    for name in rows[0]["accepted_length"]:
        axis.plot([r["step"] for r in rows], [r["accepted_length"][name] for r in rows], label=name)
    axis.set_xlabel("step of the policy")
    axis.set_ylabel("tokens a round and sequence")
    axis.grid(alpha=0.2)
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()
