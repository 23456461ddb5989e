"""How the time and the memory of a whole RL step grow with the prompts, the length and the group, each in turn.

python benchmarks/sweep.py models/smollm2 --out benchmarks/results/sweep_smollm2.json --picture docs/sweep_smollm2.svg

Every point is a process of its own, so that its peak memory is its own: one untimed step, then `--steps` timed ones (medians).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from picture import curves
from respec.bench.peers.process import WORKERS, workers
from respec.bench.record import refuse_dirty, write_result
from respec.bench.step_peers import LR

SCRIPT = WORKERS / "own_step_worker.py"
AXES = ("prompts", "group", "new_tokens")
QUESTION = "Tell me what is special about the number {}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--group", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--at", type=int, nargs=3, default=[2, 8, 128], help="the point that the axes cross in")
    parser.add_argument("--speculation", default="off")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args(arguments)
    if asked.out is not None:
        refuse_dirty()
    points: dict[tuple[int, ...], dict[str, Any]] = {}
    rows = []
    for place, axis in enumerate(AXES):
        for value in getattr(asked, axis):
            at = (*asked.at[:place], value, *asked.at[place + 1 :])
            prompts, group, new_tokens = at
            if at not in points:
                points[at] = measure(
                    asked.model, prompts, group, new_tokens, asked.speculation, asked.steps, asked.threads
                )
            rows.append({"axis": axis, "value": value} | points[at])
            print(line(rows[-1]), flush=True)
    result = {
        "what": "a sweep of whole RL steps",
        "model": Path(asked.model).name,
        "at": dict(zip(AXES, asked.at, strict=True)),
    }
    write_result(asked.out, result | {"speculation": asked.speculation, "steps": asked.steps, "rows": rows})
    if asked.picture is not None:
        draw(asked.picture, rows)


def measure(
    model: str, prompts: int, group: int, new_tokens: int, speculation: str, steps: int, threads: int
) -> dict[str, Any]:
    """One point: seconds of a step and of its parts, and the most memory that its process ever held."""
    request = {
        "model": model, "threads": threads, "prompts": [QUESTION.format(i + 2) for i in range(prompts)], "group": group,
        "new_tokens": new_tokens, "lr": LR, "steps": steps + 1, "speculation": speculation,
    }  # fmt: skip
    with workers({}, Path(".peers"), {"respec": SCRIPT}) as running:
        worker = running["respec"]
        worker.ask("load", **request)
        worker.ask("step")
        taken = [worker.ask("step") for _ in range(steps)]
    parts = {
        name: statistics.median(step[name] for step in taken) for name in ("seconds", "generation_s", "training_s")
    }
    return {"completion_tokens": taken[0]["tokens"], **parts, "peak_gib": taken[-1]["peak_bytes"] / 2**30}


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['axis']} {row['value']}: {row['completion_tokens']} tokens in {row['seconds']:.1f} s ({row['generation_s']:.1f} drawing, "
        f"{row['training_s']:.1f} learning), {row['peak_gib']:.2f} GiB"
    )


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Seconds, and memory in GiB, over the completion tokens of a step: a curve an axis for each."""
    named = {
        f"{axis.replace('_', ' ')}: {unit}": [
            (float(row["completion_tokens"]), float(row[key])) for row in rows if row["axis"] == axis
        ]
        for key, unit in (("seconds", "s"), ("peak_gib", "GiB"))
        for axis in AXES
    }
    curves(path, "A whole RL step", "completion tokens of a step", "seconds, GiB", named)


if __name__ == "__main__":
    main()
