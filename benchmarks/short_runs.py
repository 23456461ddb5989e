"""Short runs of the demo, one after the other on one thread, to compare ways of learning: each to the same number of generated tokens.

A run is kept in a folder of its own; one that was stopped goes on where it was, one that is done is only read.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from respec.config import Config, load_config
from respec.errors import NonFiniteError
from respec.loop import train
from respec.report.live import PlainView
from respec.report.provenance import commit
from respec.standalone import evaluate_alone, model_of

# What all of them have in common, beside examples/demo.toml.
COMMON = (
    "run.threads=1", "run.steps=1000", "run.compare_plain_every=0", "eval.every=0", "eval.final_items=300",
    "checkpoint.every_steps=8", "checkpoint.keep=1", "tracking.to=[]", "report.rollouts_per_step=1",
)  # fmt: skip
RESULT = "short_run.json"
# Rewards of single steps are noisy: a drop is one of the mean of so many.
WINDOW = 5
# A gradient this many times its run's median is a spike.
SPIKE = 10.0
CURVE = ("reward/mean", "policy/entropy", "policy/grad_norm", "policy/mismatch_mean", "tokens/total")


class Counting(PlainView):
    """Counts the tokens that the run has drawn, and says nothing but what is wrong. Keeps the CPU seconds spent in the run's folder, after every step, since
    a run may take several processes to its end."""

    tokens = 0.0

    def __init__(self, name: str, kept: Path) -> None:
        super().__init__(name, 1, write=lambda line: None)
        self._file = kept / "cpu_s"
        self._earlier = float(self._file.read_text()) if self._file.exists() else 0.0
        self._began = time.process_time()

    @property
    def cpu_s(self) -> float:
        return self._earlier + time.process_time() - self._began

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        self.tokens = metrics["tokens/total"]
        self._file.write_text(f"{self.cpu_s:.2f}")

    def phase(self, name: str, total: int | None = None) -> None:
        """Not shown."""

    def advance(self, done: int, note: str = "") -> None:
        """Not shown."""

    def say(self, line: str) -> None:
        if "not finite" in line or "alarm" in line:
            print(f"  {line}", file=sys.stderr)


def short_run(folder: Path, name: str, seed: int, budget: int, settings: Sequence[str]) -> dict[str, Any]:
    """Trains to `budget` tokens (the step that passes it is the last) and evaluates the last policy as the first was."""
    kept = folder / f"{name}-{seed}"
    if (kept / RESULT).exists():
        return json.loads((kept / RESULT).read_text())
    own = (f"run.seed={seed}", f"run.dir={json.dumps(str(kept))}", *COMMON, *settings)
    config, view, failed = load_config(Path("examples/demo.toml"), own), Counting(name, kept), None
    try:
        train(config, view, lambda: view.tokens >= budget)
    except NonFiniteError as error:
        failed = str(error)
    result = _summary(kept, config, failed) | {
        "name": name, "seed": seed, "settings": list(settings), "cpu_s": view.cpu_s, "commit": commit(),
    }  # fmt: skip
    (kept / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    after, before = result["accuracy_after"], result["accuracy_before"]
    print(
        f"{name:24s} seed {seed}: accuracy {before:.3f} -> {after:.3f}, worst drop {result['worst_drop']:.3f}, {result['cpu_s']:.0f} s",
        flush=True,
    )
    return result


def _summary(kept: Path, config: Config, failed: str | None) -> dict[str, Any]:
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    steps = lines[1:]
    after = evaluate_alone(config, Counting("evaluation", kept), Path(model_of(str(kept))))
    norms = [line["policy/grad_norm"] for line in steps]
    return {
        "accuracy_before": lines[0]["eval/accuracy"], "se_before": lines[0]["eval/se"], "accuracy_after": after.accuracy,
        "se_after": after.standard_error, "items": after.items, "length_after": after.mean_length, "steps": len(steps),
        "tokens": steps[-1]["tokens/total"], "trained": sum(line["policy/tokens"] for line in steps), "worst_drop": worst_drop([line["reward/mean"] for line in steps]),
        "spikes": float(np.mean([not math.isfinite(n) or n > SPIKE * float(np.median(norms)) for n in norms])),
        "entropy_after": float(np.mean([line["policy/entropy"] for line in steps[-3:]])),
        "mismatch": float(np.mean([line["policy/mismatch_mean"] for line in steps])), "failed": failed,
        "curve": {key: [line[key] for line in steps] for key in CURVE},
    }  # fmt: skip


def worst_drop(rewards: Sequence[float], window: int = WINDOW) -> float:
    """The most that the mean reward of `window` steps fell below its best before."""
    if len(rewards) < window:
        return 0.0
    means = np.convolve(rewards, np.full(window, 1 / window), "valid")
    return float((np.maximum.accumulate(means) - means).max())


def by_name(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    return {name: [run for run in runs if run["name"] == name] for name in dict.fromkeys(run["name"] for run in runs)}


def gain(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean gain in held-out accuracy over the seeds, and its standard error: that of the items drawn, or of the seeds' spread if that is more."""
    gains = [run["accuracy_after"] - run["accuracy_before"] for run in runs]
    items = math.sqrt(sum(run["se_after"] ** 2 + run["se_before"] ** 2 for run in runs)) / len(runs)
    spread = float(np.std(gains, ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    return float(np.mean(gains)), max(items, spread)
