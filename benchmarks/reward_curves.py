"""Does speculation change what is learned? Reward curves of the demo under four ways to draft, in three ways to verify.

    respec drafter train examples/demo.toml --to models/demo-eagle
    python benchmarks/reward_curves.py --head models/demo-eagle --out benchmarks/results/reward_curves.json
    python benchmarks/reward_table.py benchmarks/results/reward_curves.json > docs/reward_curves.md

Ways to draft: plain decoding, a frozen EAGLE-3 head (naive speculation), a head that learns with uniform weights, one that learns with weights
by reward (the paper's). `matching` gives them all the same curve, token for token, and `rejection` the same within seeds. `lenient` is a verifier
that this benchmark breaks on purpose: it accepts a draft with min(1, 3 p / q), and stamps the token as the policy's all the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from respec.bench.record import refuse_dirty, write_result

LENIENCE = 3.0
LEARN = ("drafter.learn=true", "drafter.share=0.25", "drafter.lr=4e-4")
WAYS: Mapping[str, Sequence[str]] = {
    "plain": ('speculation.drafter="off"',),
    "frozen": (),
    "uniform": LEARN,
    "reward": (*LEARN, 'drafter.weighting="reward"'),
}
KEPT = ("reward/mean", "rollout/accepted_length", "rollout/entropy", "rollout/surprise", "rollout/surprise_square", "rollout/tokens", "eval/accuracy")  # fmt: skip
# What a run of the broken verifier executes: nothing of the package can be set to do this.
LENIENT = (
    "from respec.rollout import verify; plain = verify.uniform; "
    f"verify.uniform = lambda key, index: plain(key, index) / {LENIENCE}; from respec.cli import main; main()"
)


def run(verifier: str, way: str, seed: int, head: Path, steps: int, folder: Path) -> dict[str, Any]:
    """One RL run in a process of its own, on one thread."""
    target = folder / f"{verifier}-{way}-{seed}"
    mode = "matching" if verifier == "matching" or way == "plain" else "rejection"
    sets = (
        f"run.seed={seed}", f"run.dir={json.dumps(str(target))}", f"run.steps={steps}", "run.threads=1", "run.compare_plain_every=0",
        f"speculation.mode={json.dumps(mode)}", 'speculation.drafter="eagle"', f"speculation.drafter_path={json.dumps(str(head))}",
        "speculation.s=4", "eval.every=0", "checkpoint.every_steps=0", "report.tensorboard=false", *WAYS[way],
    )  # fmt: skip
    words = [word for item in sets for word in ("--set", item)]
    code = LENIENT if verifier == "lenient" else "from respec.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "examples/demo.toml", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{verifier}, {way}, seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    steps_made = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    said = [line for line in done.stdout.splitlines() if "not the policy's own draws" in line]
    curve = [{name: step[name] for name in KEPT if name in step} | {"step": step["step"]} for step in steps_made]
    print(f"{verifier:9s} {way:8s} seed {seed}: accuracy {curve[-1].get('eval/accuracy', 0):.3f}", flush=True)
    return {"verifier": verifier, "way": way, "seed": seed, "mode": mode, "curve": curve, "alarm": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, of one thread each")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        refuse_dirty()
    seeds = range(asked.seeds)
    wanted: list[tuple[str, str, int]] = [("matching", way, 0) for way in WAYS]
    wanted += [("matching", "plain", seed) for seed in seeds if seed]
    wanted += itertools.product(("rejection", "lenient"), ("frozen", "uniform", "reward"), seeds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        found = [
            pool.submit(run, verifier, way, seed, asked.head, asked.steps, Path(folder))
            for verifier, way, seed in wanted
        ]
        runs = [future.result() for future in found]
    write_result(asked.out, {"what": "reward curves by way to draft and to verify", "lenience": LENIENCE, "runs": runs})


if __name__ == "__main__":
    main()
