"""Writes results of `respec bench rollout` and `respec bench step` as Markdown, and draws them: ratios with their spread.

python benchmarks/peers_table.py docs/peers.png benchmarks/results/peers_*.json > docs/peers.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FITS = {True: "fit", False: "**do not fit**", None: "unchecked"}


def main(picture: str, paths: Sequence[str]) -> None:
    results = {path: json.loads(Path(path).read_text()) for path in paths}
    print("# Beside the peers\n")
    print(f"![Ratios of all measurements below, with their spread]({Path(picture).name})\n")
    print(
        "Same model, prompts, lengths, sampling (temperature 1) and threads; repeats interleaved, each peer in a process of its own that is stopped "
        "while another is timed. A ratio is ours over theirs within one repeat: the median, then the lowest and highest.\n"
    )
    for path, result in results.items():
        print(f"## {title(result)}\n")
        print(circumstances(path, result))
        if "whole RL step" in result["what"]:
            print_steps(result["rows"])
        else:
            print_rollouts(result["rows"])
            print_misfits(result["samples"])
    draw(Path(picture), list(results.values()))


def title(result: dict[str, Any]) -> str:
    if "whole RL step" in result["what"]:
        return f"A whole RL step of {result['completions']} x {result['new_tokens']} tokens: {result['model']}"
    ends = "by their own EOS, at most" if result["own_eos"] else "of exactly"
    return f"Completions {ends} {result['new_tokens']} tokens: {result['model']} on {result['task']}"


def circumstances(path: str, result: dict[str, Any]) -> str:
    at = result["provenance"]
    versions = "; ".join(
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in held.items())
        for name, held in result["peer_versions"].items()
    )
    return (
        f"{result['repeats']} repeats, groups of {result['group']}, {result['threads']} threads of {at['processor']} ({at['cores']} cores), "
        f"commit `{str(at['commit'])[:10]}`, `{path}`. {versions}.\n"
    )


def ratio(row: dict[str, Any]) -> str:
    return f"**{row['ratio']:.2f}x** ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"


def print_rollouts(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| batch | ours | peer | ratio | ours tokens/s | peer tokens/s | tokens a pass, ours / peer | mean length, ours / peer | "
        "entropy, nats | peer's samples |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['batch']} | `{row['ours']}` | `{row['peer']}` | {ratio(row)} | {row['tokens_per_s']:.0f} | {row['peer_tokens_per_s']:.0f} | "
            f"{row['accepted_length']:.2f} / {row['peer_accepted_length']:.2f} | {row['lengths']['mean']:.0f} / {row['peer_lengths']['mean']:.0f} | "
            f"{row['policy_entropy']:.2f} | {FITS[row['peer_fits']]} |"
        )
    print()


def print_misfits(samples: dict[str, Sequence[dict[str, Any]]]) -> None:
    for name, findings in samples.items():
        for finding in findings:
            if finding["outcome"] == "failed":
                print(f"- `{name}`, {finding['check']}: {finding['sentence']}.")
    print()


def print_steps(rows: Sequence[dict[str, Any]]) -> None:
    print("| peer | faster | ours s (generation, training) | peer s | ours GiB | peer GiB | entropy, nats |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| `{row['peer']}` | {ratio(row)} | {row['seconds']:.1f} ({row['generation_s']:.1f}, {row['training_s']:.1f}) | "
            f"{row['peer_seconds']:.1f} | {row['peak_gib']:.1f} | {row['peer_peak_gib']:.1f} ({1 / row['memory_ratio']:.1f}x) | "
            f"{row['policy_entropy']:.2f} |"
        )
    print()


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """One panel a result: a bar a row, whiskers from the lowest to the highest ratio, hatched where the peer's samples do not fit."""
    counts = [len(result["rows"]) for result in results]
    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(9, 1.2 * len(results) + 0.3 * sum(counts)), squeeze=False, height_ratios=[n + 2 for n in counts]
    )  # fmt: skip
    for panel, result in zip(panels[:, 0], results, strict=True):
        for place, row in enumerate(result["rows"]):
            low, high = row["ratio"] - row["ratio_min"], row["ratio_max"] - row["ratio"]
            hatch = "///" if row.get("peer_fits") is False else ""
            panel.barh(
                place, row["ratio"], xerr=[[low], [high]], height=0.7, color="#4c78a8", edgecolor="white", hatch=hatch
            )
            panel.text(row["ratio_max"], place, f"  {row['ratio']:.2f}x", va="center", fontsize=8)
        panel.axvline(1.0, color="black", linewidth=0.8)
        names = [
            f"batch {row['batch']}: {row['ours']} / {row['peer']}" if "batch" in row else f"respec / {row['peer']}"
            for row in result["rows"]
        ]
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.15 * max(row["ratio_max"] for row in result["rows"]))
        panel.set_title(title(result), fontsize=9, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("times as fast as the peer; hatched: the peer's samples do not follow the model", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
