"""Every way to draft on SmolLM2-135M, as it comes and warmed up to sums, at two temperatures: one run, one file, written after each section.

respec fetch smollm2
respec warmup examples/smollm2.toml --set warmup.steps=12 --to models/smollm2-warm
respec drafter train examples/smollm2.toml --to models/smollm2-eagle
respec drafter train examples/smollm2.toml --model models/smollm2-warm --to models/smollm2-warm-eagle
python benchmarks/draft_model.py models/smollm2-warm models/smollm2-first4
respec warmup examples/smollm2.toml --set model.path=models/smollm2-first4 --set warmup.lr=5e-4 --to models/smollm2-small
python benchmarks/ways_to_draft.py --out benchmarks/results/ways_to_draft.json
python benchmarks/speculation_table.py benchmarks/results/ways_to_draft.json > docs/speculation_smollm2.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from respec.bench.record import refuse_dirty, write_result
from respec.cli.app import no_bars
from respec.config import load_config
from respec.measuring import measure_speculation

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONFIG = Path("examples/smollm2.toml")
LOOK_UP = ("ngram:4", "suffix:8", "suffix:6:3:16", "suffix:8+history", "previous:8+history")
EAGLE = ("eagle:2", "eagle:3", "eagle:5", "eagle:4:2:8", "eagle:3+rejection")


@dataclass(frozen=True)
class Section:
    """One policy at one temperature."""

    name: str
    model: str
    eagle: str
    variants: tuple[str, ...]
    temperature: float
    repeats: int
    new_tokens: int


MODELS = ("self_quant:2", "model:3")
SECTIONS = (
    Section("warmed up", "smollm2-warm", "smollm2-warm-eagle", (*LOOK_UP, *MODELS, *EAGLE, "auto"), 1.0, 4, 96),
    Section("warmed up", "smollm2-warm", "smollm2-warm-eagle", (*LOOK_UP[:3], LOOK_UP[4], *MODELS, *EAGLE[1:4], "auto"), 0.6, 2, 96),
    Section("as it comes", "smollm2", "smollm2-eagle", (*LOOK_UP[:2], *EAGLE[:1], "auto"), 1.0, 2, 32),
    Section("as it comes", "smollm2", "smollm2-eagle", (*LOOK_UP[:2], *EAGLE[:1], "auto"), 0.6, 2, 32),
)  # fmt: skip


def measure(section: Section, models: Path, batches: Sequence[int]) -> dict[str, Any]:
    settings = (
        f"model.path={models / section.model}", f"speculation.drafter_path={models / section.eagle}",
        f"speculation.draft_model={models / 'smollm2-small'}", f"rollout.max_new_tokens={section.new_tokens}",
        'speculation.candidates=["suffix", "eagle"]', "run.threads=0",
    )  # fmt: skip
    config = load_config(CONFIG, settings)
    found = measure_speculation(
        config, None, section.variants, batches, 4, section.temperature, section.repeats, None, lambda line: print(line, flush=True)
    )  # fmt: skip
    return {"section": section.name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--batch", type=int, action="append", help="batch sizes; all of the table's by default")
    parser.add_argument("--section", type=int, action="append", help="0 to 3; all by default")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        refuse_dirty()
    no_bars()
    found: list[dict[str, Any]] = []
    for number in asked.section or range(len(SECTIONS)):
        section = SECTIONS[number]
        print(f"{section.name}, temperature {section.temperature}", flush=True)
        found.append(measure(section, asked.models, asked.batch or BATCHES))
        write_result(asked.out, {"what": "ways to draft on SmolLM2-135M", "sections": found})


if __name__ == "__main__":
    main()
