"""Does speculation change what is learned? Reward curves of the demo under four ways to draft, in three ways to verify.

    respec drafter train examples/demo.toml --to models/demo-eagle
    python benchmarks/reward_curves.py --head models/demo-eagle --runs runs/curves --out benchmarks/results/reward_curves.json
    python benchmarks/reward_table.py benchmarks/results/reward_curves.json --picture docs/reward_curves.svg > docs/reward_curves.md

Ways to draft: plain decoding, a frozen EAGLE-3 head (naive speculation), a head that learns with uniform weights, one that learns with weights
by reward (the paper's). `matching` gives them all the same curve, token for token, and `rejection` the same within seeds. `lenient` is a verifier
that this benchmark breaks on purpose: it accepts a draft with min(1, 3 p / q), and stamps the token as the policy's all the same.

Whatever a run was trained with, its last policy is held out against the same rows by plain decoding: so the accuracy is the policy's own, and
not the verifier's. A run that is finished is kept in --runs and not made again by the same commit under the same settings.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from respec.bench.record import refuse_dirty, write_result
from respec.config import load_config
from respec.report.live import PlainView
from respec.report.provenance import commit
from respec.report.records import read_rollouts
from respec.standalone import evaluate_alone, model_of

CONFIG = Path("examples/demo.toml")
LENIENCE = 3.0
LEARN = ("drafter.learn=true", "drafter.share=0.25", "drafter.lr=4e-4")
WAYS: Mapping[str, Sequence[str]] = {
    "plain": ('speculation.drafter="off"',),
    "frozen": (),
    "uniform": LEARN,
    "reward": (*LEARN, 'drafter.weighting="reward"'),
}
KEPT = ("reward/mean", "rollout/accepted_length", "rollout/entropy", "rollout/surprise", "rollout/surprise_square", "rollout/tokens", "policy/mismatch_mean")  # fmt: skip
# What a run of the broken verifier executes: nothing of the package can be set to do this.
LENIENT = (
    "from respec.rollout import verify; plain = verify.uniform; "
    f"verify.uniform = lambda key, index: plain(key, index) / {LENIENCE}; from respec.cli import main; main()"
)
EXACT = "from respec.cli import main; main()"


def run(verifier: str, way: str, seed: int, head: Path, common: Sequence[str], folder: Path) -> dict[str, Any]:
    """One RL run in a process of its own, on one thread; what was kept of it where it was made before."""
    name = f"{verifier}-{way}-{seed}"
    kept, target = folder / f"{name}.json", (folder / name).resolve()
    mode = "rejection" if verifier != "matching" and way != "plain" else "matching"
    settings = [
        f"run.seed={seed}", f"speculation.mode={json.dumps(mode)}", 'speculation.drafter="eagle"',
        f"speculation.drafter_path={json.dumps(str(head))}", *common, *WAYS[way],
    ]  # fmt: skip
    asked = {"verifier": verifier, "way": way, "seed": seed, "settings": settings, "commit": commit()}
    if kept.exists():
        found = json.loads(kept.read_text())
        if all(found[key] == value for key, value in asked.items()):
            return found
    sets = [*settings, f"run.dir={json.dumps(str(target))}"]
    done = subprocess.run(
        [sys.executable, "-c", LENIENT if verifier == "lenient" else EXACT, "train", str(CONFIG), "--fresh", *_words(sets)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    steps = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()][1:]
    curve = [
        {"step": s["step"], **{key: s[key] for key in KEPT if key in s}, "rollouts": _digest(target, s["step"])}
        for s in steps
    ]
    final = Path(model_of(str(target)))
    plain = load_config(CONFIG, (*settings, 'speculation.drafter="off"', "drafter.learn=false", "eval.final_items=0"))
    held_out = evaluate_alone(plain, PlainView(name, 0, lambda line: None), final)
    made = asked | {
        "curve": curve,
        "alarm": [line for line in done.stdout.splitlines() if "not the policy's own draws" in line],
        "weights": hashlib.sha256((final / "model.safetensors").read_bytes()).hexdigest(),
        "held_out": {"accuracy": held_out.accuracy, "items": held_out.items, "entropy": held_out.mean_entropy},
    }
    kept.write_text(json.dumps(made) + "\n")
    shutil.rmtree(target)
    print(f"{name}: held-out accuracy {held_out.accuracy:.3f}", flush=True)
    return made


def _words(sets: Sequence[str]) -> list[str]:
    return [word for item in sets for word in ("--set", item)]


def _digest(run: Path, step: int) -> str:
    """Of a step's rollouts: which prompt, which sample, its tokens, and their log-probabilities as recorded."""
    parts = [
        (s.rollout.key, s.rollout.token_T.tobytes(), s.rollout.logprob_T.tobytes()) for s in read_rollouts(run, step)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"), help="where finished runs are kept")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, each drawn from 8 times")
    parser.add_argument(
        "--lr", type=float, default=1.5e-4, help="the policy's: it is to move away from the frozen head"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--verifiers", nargs="+", default=["matching", "rejection", "lenient"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        refuse_dirty()
    torch.set_num_threads(1)
    asked.runs.mkdir(parents=True, exist_ok=True)
    common = [
        f"run.steps={asked.steps}", "run.threads=1", "run.compare_plain_every=0", f"rollout.prompts_per_step={asked.prompts}",
        f"policy.lr={asked.lr}", "rollout.max_batch=32", "speculation.s=4", "eval.every=0", "eval.final_items=1", "checkpoint.every_steps=0", "tracking.to=[]",
    ]  # fmt: skip
    drafted, seeds = [way for way in WAYS if way != "plain"], range(asked.seeds)
    # seed by seed, so that what there is at any time is balanced
    wanted = list[tuple[str, str, int]]()
    for seed in seeds:
        wanted += [("matching", way, seed) for way in (WAYS if seed == 0 else ("plain",))]
        wanted += [(v, w, seed) for v, w in itertools.product(("rejection", "lenient"), drafted)]
    runs = [run(*cell, asked.head, common, asked.runs) for cell in wanted if cell[0] in asked.verifiers]
    result = {
        "what": "reward curves by way to draft and to verify", "lenience": LENIENCE, "steps": asked.steps, "prompts_per_step": asked.prompts,
        "lr": asked.lr, "threads": 1, "runs": runs,
    }  # fmt: skip
    write_result(asked.out, result)


if __name__ == "__main__":
    main()
