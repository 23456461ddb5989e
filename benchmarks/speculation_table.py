"""Writes results of ways to draft as Markdown: acceptance by depth, tokens/s over plain decoding, and `auto` beside the rest.

Takes the JSON of `ways_to_draft.py`, or of one `respec bench speculation`:

python benchmarks/speculation_table.py benchmarks/results/ways_to_draft.json > docs/speculation_smollm2.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEPTHS = 5


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    at = result["provenance"]
    sections: list[dict[str, Any]] = result.get("sections", [result])
    print(f"# Ways to draft: {sections[0]['task']}\n")
    print(
        f"One recorded run on {at['threads']} threads of {at['processor']} ({at['cores']} cores), commit `{str(at['commit'])[:10]}`, `{path}`. "
        "Ratios are of repeats that ran interleaved, their median; tokens were identical wherever the mode is `matching`.\n"
    )
    for section in sections:
        _section(section)


def _section(section: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = section["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    cell = {(row["variant"], row["batch"]): row for row in rows}
    entropy = sum(row["policy_entropy"] for row in rows) / len(rows)
    name = section.get("section", section["model"])
    print(f"## {section['model']}, {name}, temperature {section['temperature']}\n")
    print(
        f"Groups of {section['group']} on held-out prompts, at most {section['max_new_tokens']} tokens, {section['dtype']}; mean entropy of the policy "
        f"{entropy:.2f} nats/token; {section['repeats']} repeats.\n"
    )
    fixed = "whole_ratio" in rows[0]
    print(
        "Tokens/s over plain decoding of the same completions in the same engine (tokens a round and sequence)"
        f"{', of the rounds while all places of the batch were taken' if fixed else ''}:\n"
    )
    _table(["way", *(f"batch {batch}" for batch in batches)], [
        [f"`{variant}`", *(f"{c['ratio']:.2f}x ({c['accepted_length']:.2f})" for c in (cell[variant, b] for b in batches))]
        for variant in variants
    ])  # fmt: skip
    if fixed:
        print("The same of whole runs of three times as many completions, the last third of which thins out:\n")
        _table(["way", *(f"batch {batch}" for batch in batches)], [
            [f"`{variant}`", *(f"{cell[variant, b]['whole_ratio']:.2f}x" for b in batches)] for variant in variants
        ])  # fmt: skip
    plain = [cell[variants[0], batch]["off_tokens_per_s"] for batch in batches]
    print("Plain decoding, tokens/s: " + ", ".join(f"{rate:.0f}" for rate in plain) + ".\n")
    static = [variant for variant in variants if not variant.startswith("auto")]
    print("Acceptance by depth, of drafts whose earlier tokens were accepted, and where the time went, at batch 1:\n")
    _table(["way", *(f"depth {d}" for d in range(1, DEPTHS + 1)), "draft", "verify", "overhead"], [
        [f"`{variant}`", *_acceptance(cell[variant, batches[0]]), *_shares(cell[variant, batches[0]])] for variant in static
    ])  # fmt: skip
    if section.get("auto"):
        _auto(section["auto"])


def _acceptance(row: dict[str, Any]) -> list[str]:
    found = [f"{100 * share:.0f} %" for share in row["acceptance_by_depth"][:DEPTHS]]
    return found + ["–"] * (DEPTHS - len(found))


def _shares(row: dict[str, Any]) -> list[str]:
    parts = [row["draft_s"], row["verify_s"], row["overhead_s"]]
    return [f"{100 * part / sum(parts):.0f} %" for part in parts]


def _auto(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "`auto` over plain decoding, and over the best static way (picked on half of the repeats, compared on the other half), with 95 % "
        "bootstrap intervals:\n"
    )
    _table(["batch", "over off", "over the best static", "which"], [
        [
            str(row["batch"]), _ratio(row, "over_off"),
            _ratio(row, "over_best_static") if "over_best_static" in row else "–", f"`{row.get('best_static', '–')}`",
        ]
        for row in rows
    ])  # fmt: skip


def _ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
