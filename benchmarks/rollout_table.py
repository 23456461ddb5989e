"""Writes a result of `respec bench speculation --rollout` as Markdown: every way to draft over whole rollouts, and `auto` beside the best.

python benchmarks/rollout_table.py benchmarks/results/rollouts_smollm2.json > docs/rollouts_smollm2.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RIVALS = (
    ("off", "plain decoding"),
    ("best_static", "the best single plan"),
    ("best_on_off", "the best plan turned on and off"),
)


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    at, length = result["provenance"], result["length"]
    print(f"# Whole rollouts: {result['model']} on `{result['task']}`\n")
    print(
        f"{result['sequences']} sequences in groups of {result['group']}, all begun at once, {length['min']} to {length['max']} tokens long (median "
        f"{length['median']:.0f}); temperature {result['temperature']}, mean entropy {result['policy_entropy']:.2f} nats/token; {result['dtype']}, "
        f"{at['threads']} threads of {at['processor']} ({at['cores']} cores); {result['repeats']} interleaved repeats, medians; commit "
        f"`{str(at['commit'])[:10]}`; `{path}`.\n"
    )
    print("| way | seconds | over plain decoding | rounds | tokens a round and sequence | same tokens |")
    print("|---|---|---|---|---|---|")
    for row in result["rows"]:
        same = {None: "–", True: "yes", False: "NO"}[row["identical"]]
        print(
            f"| `{row['variant']}` | {row['seconds']:.2f} | {with_interval(row['ratio'], row['interval'])} | {row['rounds']:.0f} | "
            f"{row['accepted_length']:.2f} | {same} |"
        )
    for auto in result["auto"]:
        print(
            f"\n`{auto['variant']}`, where the rival is picked on half of the repeats and compared on the other, with 95 % intervals:\n"
        )
        print("| over | | which |")
        print("|---|---|---|")
        for name, words in RIVALS:
            if f"over_{name}" in auto:
                over = with_interval(auto[f"over_{name}"], auto[f"over_{name}_interval"], 3)
                print(f"| {words} | {over} | `{auto.get(name, 'off')}` |")


def with_interval(value: float, interval: tuple[float, float], digits: int = 2) -> str:
    low, high = interval
    return f"{value:.{digits}f}x ({low:.{digits}f}–{high:.{digits}f})"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
