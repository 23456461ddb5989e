"""A GRPOTrainer's own step against the same with our rollouts: one trainer, one model, the same prompts, side by side.

    pip install 'respec-rl[trl]'
    python benchmarks/trl_speed.py models/smollm2-warm --blocks 6 --steps 0 --out benchmarks/results/trl_generation_smollm2.json
    python benchmarks/trl_speed.py models/smollm2-warm --blocks 0 --steps 3 --out benchmarks/results/trl_step_smollm2.json

What draws is exchanged between generations, in turning order; all else is TRL's. Float32, as TRL is told; `respec bfloat16` decodes in that, which
TRL's optimizer does not correct for. Completions end at EOS: both sides draw from the same law, not the same tokens, so generation is
compared by tokens/s. A step is from its beginning to the end of the optimizer's, new weights for our engine included. The first pass of each side
is not timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from respec.bench.peers.wire import distinct_words
from respec.bench.record import refuse_dirty, write_result
from respec.integrations.trl import RespecRollouts
from respec.report.provenance import usable_cores

OWN = "trl"
TEMPLATE = "Work out step by step: {expression}\n"


def sides(names: list[str]) -> dict[str, RespecRollouts | None]:
    """What draws, by name; TRL's own generation is none of ours."""
    made: dict[str, Callable[[], RespecRollouts | None]] = {
        OWN: lambda: None,
        "respec": RespecRollouts,
        "respec off": lambda: RespecRollouts({"drafter": "off"}),
        "respec bfloat16": lambda: RespecRollouts(dtype="bfloat16"),
    }
    return {name: made[name]() for name in names}


def turned(names: list[str], block: int) -> list[str]:
    """The order of a block: each side is first in its turn."""
    turn = block % len(names)
    return names[turn:] + names[:turn]


class Turns(TrainerCallback):
    """Exchanges what draws before each step and times it."""

    def __init__(
        self, drawn_by: dict[str, RespecRollouts | None], order: list[str], drawn: list[dict[str, Any]]
    ) -> None:
        self.sides, self.order, self.drawn = drawn_by, order, drawn
        self.trainer: Any = None
        self.taken: list[dict[str, Any]] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.rollout_func = self.sides[self.order[len(self.taken)]]
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self.began
        self.taken.append({"side": self.order[len(self.taken)], "seconds": seconds, **self.drawn[-1]})
        print(f"step {len(self.taken)}: {self.taken[-1]}", flush=True)


def measure(
    model: str, names: list[str], prompts: int, group: int, new: int, blocks: int, steps: int
) -> dict[str, Any]:
    drawn_by, drawn = sides(names), list[dict[str, Any]]()
    sums: Any = reasoning_gym.create_dataset(
        "chain_sum", size=prompts * (1 + max(blocks, steps)), seed=0, min_terms=3, max_terms=8, min_digits=1, max_digits=1
    )  # fmt: skip
    texts = [TEMPLATE.format(expression=item["metadata"]["expression"]) for item in sums]
    # a block's prompts come once for each side, and never again: no epoch before helps the look-up drafter
    asked = [texts[block * prompts : (block + 1) * prompts] for block in range(1 + max(blocks, steps))]
    order = [name for block in range(steps + 1) for name in turned(names, block)]
    turns = Turns(drawn_by, order, drawn)

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        return [*distinct_words(completions)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [text for block in asked for _ in names for text in block]}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=prompts * group,
            num_generations=group, max_completion_length=new, shuffle_dataset=False, learning_rate=1e-6, max_steps=len(order),
            save_strategy="no", report_to=[], logging_steps=10_000, disable_tqdm=True, seed=0,
        ),
        callbacks=[turns],
    )  # fmt: skip
    turns.trainer, own = trainer, trainer._generate
    assert trainer.model is not None
    trainer.model.train()  # else generations are taken for evaluations

    def timed(given: list[Any]) -> Any:
        began = time.perf_counter()
        made = own(given)
        drawn.append({"generation_s": time.perf_counter() - began, "tokens": sum(map(len, made[1]))})
        return made

    trainer._generate = timed  # pyright: ignore[reportAttributeAccessIssue]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks + 1 if blocks else 0):
        for name in turned(names, block):
            trainer.rollout_func = drawn_by[name]
            trainer._generate([text for text in asked[block] for _ in range(group)])
            rate = drawn[-1]["tokens"] / drawn[-1]["generation_s"]
            print(f"block {block}: {name} {rate:,.0f} tokens/s", flush=True)
            if block:
                rates[name].append(rate)
    if steps:
        trainer.train()
    timed_steps = turns.taken[len(names) :]
    seconds = {name: [step["seconds"] for step in timed_steps if step["side"] == name] for name in names}
    tokens = {name: [step["tokens"] for step in timed_steps if step["side"] == name] for name in names}
    return {
        "what": "TRL's GRPOTrainer with its own generation and with our rollouts", "model": model, "completions": prompts * group, "group": group,
        "most_new_tokens": new, "temperature": 1.0, "dtype": "float32",
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
        "tokens_per_s": rates, "generation": _beside(names, rates, faster=True),
        "steps": timed_steps, "step": _beside(names, seconds, faster=False),
        "tokens_of_steps": {name: sum(tokens[name]) for name in names} if steps else None,
    }  # fmt: skip


def _beside(names: list[str], figures: dict[str, list[float]], faster: bool) -> dict[str, dict[str, float]]:
    """Each of ours against TRL's own, block by block: how many times as fast."""
    ratios = {
        name: [(a / b if faster else b / a) for a, b in zip(figures[name], figures[OWN], strict=True)] for name in names
    }
    return {
        name: {
            "median": statistics.median(figures[name]), "times_as_fast": statistics.median(r), "least": min(r), "most": max(r)
        }
        for name, r in ratios.items() if r
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sides", default="trl,respec,respec off,respec bfloat16")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=6, help="generations alone, timed, of each side")
    parser.add_argument("--steps", type=int, default=3, help="whole steps, timed, of each side")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    torch.set_num_threads(usable_cores())
    names = given.sides.split(",")
    measured = measure(given.model, names, given.prompts, given.group, given.new_tokens, given.blocks, given.steps)
    result = write_result(given.out, measured)
    print({key: result[key] for key in ("generation", "step", "tokens_of_steps")})


if __name__ == "__main__":
    main()
