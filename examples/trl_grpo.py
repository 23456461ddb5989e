"""TRL's GRPOTrainer with our rollouts: the built-in demo model learns chains of sums.

pip install 'respec-rl[trl]'
python examples/trl_grpo.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import respec
from respec.integrations.trl import RespecRollouts

DEMO = Path(respec.__file__).parent / "models" / "demo"


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1 for the right number between <answer> and </answer>."""
    found = [re.search(r"<answer>(-?\d+)</answer>", text) for text in completions]
    return [float(match is not None and match[1] == wanted) for match, wanted in zip(found, answer, strict=True)]


def main(steps: int = 10, folder: str = "runs/trl") -> GRPOTrainer:
    sums: Any = reasoning_gym.create_dataset(
        "chain_sum", size=64, seed=0, min_terms=3, max_terms=8, min_digits=1, max_digits=1
    )
    rows = [{"prompt": f"{item['metadata']['expression']}\n", "answer": item["answer"]} for item in sums]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(DEMO),
        reward_funcs=right,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=128,
            learning_rate=1e-4, temperature=1.0, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        ),
        rollout_func=RespecRollouts({"drafter": "suffix", "s": 8}),  # without arguments: `auto`
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    for line in main().state.log_history:
        if "reward" in line:
            said = {name: line[f"respec/rollout/{name}"] for name in ("tokens_per_s", "accepted_length")}
            print(f"reward {line['reward']:.2f}  " + "  ".join(f"{name} {value:,.2f}" for name, value in said.items()))
