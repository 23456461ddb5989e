"""How much faster are rollouts over prompts that the run has seen before? Two epochs of real RL, each step's prompts drawn once more by plain decoding.

    python benchmarks/second_epoch.py examples/smollm2.toml --model models/smollm2-warm --head models/smollm2-warm-eagle \\
        --places 2 8 --out benchmarks/results/second_epoch_smollm2.json

Every draw is fresh, and the policy has been updated since the first epoch; what the drafters have kept of it is text alone. `--places` are
sequences decoded at once, a run each. About a minute a step on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from respec.bench.record import refuse_dirty, write_result
from respec.config import Config, load_config
from respec.loop import train
from respec.report.live import PlainView

KEPT = (
    "rollout/speedup",
    "rollout/accepted_length",
    "rollout/tokens_identical",
    "policy/entropy",
    "rollout/tokens_per_s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head, which learns along; none: look-ups alone")
    parser.add_argument("--places", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=5, help="of an epoch")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=Path("runs/second_epoch"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    runs = list[dict[str, Any]]()
    for places in given.places:
        config = load_config(given.config, tuple(settings(given, places)))
        train(config, PlainView(f"{places} places", config.run.steps), lambda: False)
        runs.append({"places": places, "epochs": epochs(config, given.steps)})
        print(json.dumps(runs[-1], indent=1), flush=True)
    write_result(given.out, {
        "what": "rollouts over plain decoding, by epoch", "config": str(given.config), "model": Path(given.model).name,
        "steps_of_an_epoch": given.steps, "prompts": given.prompts, "settings": given.set, "runs": runs,
    })  # fmt: skip


def settings(given: argparse.Namespace, places: int) -> list[str]:
    """Two epochs over the same prompts, every step compared; the warm-up and held-out measurements are left out."""
    head = given.head is not None
    drafters = ["suffix", "ngram", "previous", *(["eagle"] if head else [])]
    learned = [f"speculation.drafter_path={given.head}", "drafter.learn=true"] if head else []
    return [
        f"model.path={given.model}", f"run.dir={given.folder / str(places)}", f"run.steps={2 * given.steps}", "run.compare_plain_every=1",
        f"task.train_size={given.steps * given.prompts}", "task.eval_size=8", f"rollout.prompts_per_step={given.prompts}",
        f"rollout.max_batch={places}", "warmup.steps=0", "eval.every=0", "eval.final_items=8", "checkpoint.every_steps=1000",
        "tracking.to=[]", "speculation.drafter=auto", f"speculation.candidates={json.dumps(drafters)}", *learned, *given.set,
    ]  # fmt: skip


def epochs(config: Config, steps: int) -> list[dict[str, Any]]:
    """What every step recorded, and of each epoch the ratio's median and spread."""
    lines = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: line[key] for key in KEPT if key in line} for line in lines if "rollout/speedup" in line]
    return [epoch(rows[:steps]), epoch(rows[steps:])]


def epoch(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["rollout/speedup"] for row in rows]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "steps": list(rows)}


if __name__ == "__main__":
    main()
