"""Is the drafter that a run leaves behind better for its last policy than the one it began with? Tokens a round, and tokens/s, of both.

    respec train examples/demo.toml --set run.dir=runs/learned --set speculation.drafter=eagle --set speculation.drafter_path=models/demo-eagle \\
        --set speculation.s=4 --set drafter.learn=true --set policy.lr=3e-4
    python benchmarks/kept_drafter.py runs/learned --blocks 12 --out benchmarks/results/kept_drafter_demo.json

The last policy answers held-out prompts by plain decoding, with the head that the run began with, and with the one it has saved: the same
tokens, which is checked, in blocks whose order turns. The first pass of each is not timed; with --blocks 0 there are no others, and no seconds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from respec.bench.record import refuse_dirty, write_result
from respec.config import load_config
from respec.models.decoder import decode_dtype
from respec.models.eagle import load_head
from respec.models.load import load_policy
from respec.report.provenance import usable_cores
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.standalone import model_of
from respec.tasks.task import load_task
from respec.types import PLAIN, Ask, Plan, Rollout, RolloutStats, Sampling, Stream
from respec.weights.publish import publish


@dataclass(frozen=True)
class Way:
    """A way to draft for the same prompts."""

    engine: Engine
    plan: Plan

    def draw(self, asks: list[Ask], sampling: Sampling) -> tuple[tuple[Rollout, ...], RolloutStats]:
        return self.engine.rollout(asks, sampling, self.plan)


def measure(run: Path, prompts: int, group: int, blocks: int) -> dict[str, Any]:
    config = load_config(run / "config.toml")
    torch.set_num_threads(config.run.threads or usable_cores())
    begun = config.speculation.drafter_path
    assert begun is not None, "the run drafted with no head"
    policy = load_policy(config.model.model_copy(update={"path": model_of(str(run))}))
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    asks = [Ask(prompt, Stream.BENCH, 0, group) for prompt in task.held_out[:prompts]]
    sampling, s = config.rollout.sampling(), config.speculation.s
    dtype = decode_dtype(config.model.dtype, policy.model.device)

    def way(head: Path | None) -> Way:
        drafters = () if head is None else (EagleDrafter(load_head(head).to(policy.model.device), dtype),)
        engine = Engine(
            publish(policy, config.model.dtype, 0), policy.tokenizer, policy.eos_token_ids, config.run.seed, config.rollout.max_batch,
            config.rollout.prefill_chunk, drafters,
        )  # fmt: skip
        return Way(engine, PLAIN if head is None else Plan("eagle", s, 1, s))

    ways = {"plain": way(None), "begun": way(begun), "kept": way(run / "drafter")}
    first = {name: one.draw(asks, sampling) for name, one in ways.items()}
    tokens = [[rollout.token_T for rollout in rollouts] for rollouts, _ in first.values()]
    assert all(np.array_equal(a, b) for other in tokens[1:] for a, b in zip(tokens[0], other, strict=True)), "differ"
    length = {name: stats.accepted_length for name, (_, stats) in first.items()}
    print({name: round(value, 3) for name, value in length.items()}, flush=True)
    rate: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for block in range(blocks):
        for name in names[block % 3 :] + names[: block % 3]:
            rate[name].append(ways[name].draw(asks, sampling)[1].tokens_per_s)
        print(f"block {block}: " + "  ".join(f"{name} {rate[name][-1]:,.0f} tokens/s" for name in names), flush=True)
    ratios = {
        f"{over} / {under}": [a / b for a, b in zip(rate[over], rate[under], strict=True)]
        for over, under in (("kept", "begun"), ("kept", "plain"), ("begun", "plain"))
    }
    return {
        "what": "the head that a run leaves behind, and the one it began with, under its last policy", "run": config.model_dump(mode="json"),
        "prompts": len(asks), "group": group, "tokens": sum(map(len, tokens[0])), "accepted_length": length,
        "kept_over_begun": length["kept"] / length["begun"], "tokens_per_s": rate if blocks else None,
        "ratios": {name: {"median": statistics.median(r), "least": min(r), "most": max(r)} for name, r in ratios.items() if r},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished run that taught its head")
    parser.add_argument("--prompts", type=int, default=64, help="held out")
    parser.add_argument("--group", type=int, default=4, help="completions of each")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    result = write_result(given.out, measure(given.run, given.prompts, given.group, given.blocks))
    print({key: result[key] for key in ("accepted_length", "kept_over_begun", "ratios")})


if __name__ == "__main__":
    main()
