"""Five kinds of run beside GRPO: does each learn, and go on after `kill -9` to the tokens of a run never killed?

    python benchmarks/five_runs.py --out benchmarks/results/five_runs.json
    python benchmarks/five_runs_table.py benchmarks/results/five_runs.json > docs/five_runs.md

PPO with a critic, adapters on SmolLM2, on-policy distillation, two agents: the examples as they are but for what SETTINGS says. The
teacher of the distillation is the last policy of `algorithms.py`'s first run of GRPO. For the second question each is made small, run
once, run once more and killed with SIGKILL between two checkpoints, and started again. Finished runs are kept in --folder, a stopped one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from respec.bench.record import refuse_dirty, write_result
from respec.config import Config, load_config
from respec.loop import train
from respec.report.provenance import commit
from short_runs import Counting

EXAMPLES: Mapping[str, str] = {
    "PPO with a critic": "ppo_demo", "LoRA on SmolLM2": "lora_smollm2", "on-policy distillation": "distill_demo",
    "FrozenLake agent": "frozen_lake", "Sokoban agent": "sokoban",
}  # fmt: skip
COMMON = ("run.threads=1", "tracking.to=[]", "checkpoint.keep=1")
SETTINGS: Mapping[str, Sequence[str]] = {
    # one core: the learner's products in bfloat16 take half of the time; no second pass by plain decoding
    "LoRA on SmolLM2": ("run.steps=12", "run.compare_plain_every=0", 'policy.dtype="bfloat16"'),
    "on-policy distillation": ('teacher.path="runs/algorithms/grpo-0"', "eval.every=10", "eval.items=250"),
}
SMALL = (
    "run.steps=4", "checkpoint.every_steps=2", "run.compare_plain_every=0", "rollout.prompts_per_step=4", "eval.every=0", "eval.final_items=4",
    "task.train_size=8", "task.eval_size=4",
)  # fmt: skip
SMALL_BY_KIND: Mapping[str, Sequence[str]] = {
    "PPO with a critic": ("critic.head_start=1", "policy.minibatches=2"),
    "LoRA on SmolLM2": ("rollout.group_size=2", "rollout.max_new_tokens=48"),
    "FrozenLake agent": ("warmup.steps=40",),
    "Sokoban agent": ("warmup.steps=40",),
}
# Killed once this step is recorded: the last checkpoint is a step older, so a step is generated again.
KILLED_AFTER = 3
CURVE = ("reward/mean", "policy/entropy", "tokens/total", "rollout/accepted_length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--small", action="store_true", help="the killed runs alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/five"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    runs = []
    for kind in given.only:
        killed = once(given.folder / f"{EXAMPLES[kind]}-killed.json", lambda kind=kind: killed_run(given.folder, kind))
        learned = (
            {}
            if given.small
            else once(given.folder / f"{EXAMPLES[kind]}.json", lambda kind=kind: whole_run(given.folder, kind))
        )
        runs.append({"kind": kind, "example": f"examples/{EXAMPLES[kind]}.toml"} | learned | {"killed": killed})
    write_result(given.out, {"what": "five kinds of run: learning, and going on after SIGKILL", "runs": runs})


def once(kept: Path, make: Any) -> dict[str, Any]:
    """What `make` gives, or gave when it was asked before."""
    if not kept.exists():
        made = make()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(made, indent=1) + "\n")
    return json.loads(kept.read_text())


def whole_run(folder: Path, kind: str) -> dict[str, Any]:
    """The run to its end, with what it recorded."""
    config = configured(kind, folder / EXAMPLES[kind], SETTINGS.get(kind, ()))
    view = Counting(kind, config.run.dir)
    train(config, view, lambda: False)
    lines = metrics_of(config.run.dir)
    steps = lines[1:]
    compared = [line["rollout/tokens_identical"] for line in steps if "rollout/tokens_identical" in line]
    print(
        f"{kind}: accuracy {lines[0]['eval/accuracy']:.3f} -> {lines[-1]['eval/accuracy']:.3f}, {view.cpu_s:.0f} s",
        flush=True,
    )
    return {
        "settings": list(SETTINGS.get(kind, ())), "commit": commit(), "cpu_s": view.cpu_s, "seed": config.run.seed,
        "accuracy": [{"step": line["step"], **{key: line[f"eval/{key}"] for key in ("accuracy", "se", "items")}} for line in lines if "eval/accuracy" in line],
        "compared_steps": len(compared), "identical_steps": sum(compared),
        "curve": {key: [line[key] for line in steps] for key in CURVE if key in steps[0]},
    }  # fmt: skip


def killed_run(folder: Path, kind: str) -> dict[str, Any]:
    """The small run, once as it is and once killed and started again; what of the two is the same, bit for bit."""
    settings = (*SETTINGS.get(kind, ()), *SMALL, *SMALL_BY_KIND.get(kind, ()))
    whole, killed = (configured(kind, folder / f"{EXAMPLES[kind]}-{way}", settings) for way in ("whole", "killed"))
    subprocess.run(command(kind, whole, settings), check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(command(kind, killed, settings), stdout=subprocess.DEVNULL)
    while process.poll() is None and recorded_steps(killed.run.dir) < KILLED_AFTER:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    died_by, died_at = -process.wait(), recorded_steps(killed.run.dir)
    subprocess.run(command(kind, killed, settings), check=True, stdout=subprocess.DEVNULL)
    ours, theirs = (rollouts_of(config.run.dir) for config in (killed, whole))
    tensors = [last_state(config.run.dir) for config in (killed, whole)]
    result = {
        "settings": list(settings), "commit": commit(), "signal": died_by, "killed_after_step": died_at, "steps": len(theirs),
        "tokens": sum(line["rollout/tokens"] for line in metrics_of(whole.run.dir)[1:]), "same_rollouts": ours == theirs,
        "same_state": tensors[0].keys() == tensors[1].keys() and all(bool((tensors[0][k] == v).all()) for k, v in tensors[1].items()),
        "tensors": len(tensors[1]),
    }  # fmt: skip
    print(
        f"{kind}: killed by signal {died_by} after step {died_at}: same {result['same_rollouts']}, {result['same_state']}",
        flush=True,
    )
    return result


def configured(kind: str, to: Path, settings: Sequence[str]) -> Config:
    return load_config(example(kind), (f"run.dir={json.dumps(str(to))}", *COMMON, *settings))


def command(kind: str, config: Config, settings: Sequence[str]) -> list[str]:
    """`respec train`, in this interpreter."""
    sets = [
        word for item in (f"run.dir={json.dumps(str(config.run.dir))}", *COMMON, *settings) for word in ("--set", item)
    ]
    return [sys.executable, "-c", "from respec.cli import main; main()", "train", str(example(kind)), *sets]


def example(kind: str) -> Path:
    return Path("examples") / f"{EXAMPLES[kind]}.toml"


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def recorded_steps(run: Path) -> int:
    """Steps whose line in metrics.jsonl is whole, the step 0 that evaluates left out."""
    file = run / "metrics.jsonl"
    return max(0, file.read_text().count("\n") - 1) if file.exists() else 0


def rollouts_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Tokens, log-probabilities, entropies, versions and rewards of every step, as they were written. Who proposed a token, and in which round, is left out:
    under `auto` that hangs on the clock, and the tokens do not."""
    return {
        file.name: [
            {name: value for name, value in json.loads(line).items() if name not in ("proposer", "round")}
            for line in file.read_text().splitlines()
        ]
        for file in sorted((run / "rollouts").glob("*.jsonl"))
    }


def last_state(run: Path) -> dict[str, Any]:
    """Every tensor of the last checkpoint: weights, moments, a critic's, what waits."""
    last = max((run / "checkpoints").iterdir())
    return {
        f"{file.name}/{name}": value
        for file in sorted(last.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


if __name__ == "__main__":
    main()
