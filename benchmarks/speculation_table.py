"""Writes a result of `respec bench speculation` as Markdown: acceptance by depth, tokens/s over plain decoding, and `auto` beside the rest.

python benchmarks/speculation_table.py benchmarks/results/speculation_smollm2.json > docs/speculation_smollm2.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DEPTHS = 5


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    rows: list[dict[str, Any]] = result["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    cell = {(row["variant"], row["batch"]): row for row in rows}
    at = result["provenance"]
    entropy = sum(row["policy_entropy"] for row in rows) / len(rows)
    print(f"# Ways to draft: {result['model']} on `{result['task']}`\n")
    print(
        f"Temperature {result['temperature']}, groups of {result['group']} on held-out prompts, {result['dtype']}, {at['threads']} threads of "
        f"{at['processor']} ({at['cores']} cores); mean entropy of the policy {entropy:.2f} nats/token; {result['repeats']} interleaved repeats, "
        f"medians; commit `{str(at['commit'])[:10]}`; `{path}`.\n"
    )
    print("Tokens/s over plain decoding of the same completions in the same engine (tokens a round and sequence):\n")
    print("| way | " + " | ".join(f"batch {batch}" for batch in batches) + " |")
    print("|---|" + "---|" * len(batches))
    for variant in variants:
        cells = [cell[variant, batch] for batch in batches]
        print(f"| `{variant}` | " + " | ".join(f"{c['ratio']:.2f}x ({c['accepted_length']:.2f})" for c in cells) + " |")
    print("\nAcceptance by depth, of drafts whose earlier tokens were accepted:\n")
    print("| way | batch | " + " | ".join(f"depth {d}" for d in range(1, DEPTHS + 1)) + " |")
    print("|---|---|" + "---|" * DEPTHS)
    for variant in variants:
        if variant.startswith("auto"):
            continue
        for batch in (batches[0], batches[-1]):
            accept = [f"{100 * a:.0f} %" for a in cell[variant, batch]["acceptance_by_depth"][:DEPTHS]]
            print(f"| `{variant}` | {batch} | " + " | ".join(accept + ["–"] * (DEPTHS - len(accept))) + " |")
    if result.get("auto"):
        print(
            "\n`auto` over plain decoding, and over the best static way (picked on half of the repeats, compared on the other), with 95 % intervals:\n"
        )
        print("| batch | over off | over the best static | which |")
        print("|---|---|---|---|")
        for row in result["auto"]:
            low, high = row["over_off_interval"]
            best = "over_best_static" in row
            against = (
                f"{row['over_best_static']:.2f} ({row['over_best_static_interval'][0]:.2f}–{row['over_best_static_interval'][1]:.2f})"
                if best
                else "–"
            )
            print(
                f"| {row['batch']} | {row['over_off']:.2f} ({low:.2f}–{high:.2f}) | {against} | {row.get('best_static', '–')} |"
            )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
