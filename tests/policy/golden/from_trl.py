"""Losses and gradients by TRL's own trainers on one small batch: written once, kept in the tree, compared with ours by test_golden_trl.py.

    make peers
    .peers/hf/bin/python tests/policy/golden/from_trl.py tests/policy/data

Nothing of TRL is changed but where completions come from: `_generate` hands over those of the batch. The trainer scores them, makes the
advantages and, under the old weights, the old log-probabilities (`num_iterations=2`); then the weights are moved, and its `compute_loss` and a
backward pass give what is written. All of it in float64. The batch is made here and written down beside.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

PACKAGES = ("trl", "transformers", "torch", "numpy")
EOS, WORDS, GROUP, LONGEST, TEMPERATURE = 0, 19, 4, 9, 0.9
MODEL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": True, "eos_token_id": EOS,
}  # fmt: skip
# three prompts of four completions; those of the full length have no EOS. Multiples of 1/8, so that float32 holds rewards exactly
LENGTHS = [[3, 9, 1, 6], [9, 2, 5, 9], [4, 7, 2, 2]]
REWARDS = [[1.0, 0.0, 0.5, 0.125], [0.25, 0.25, 1.0, 0.0], [0.0, 1.0, 1.0, 0.75]]
# how far theta is from the old policy: ratios of tokens reach from 0.2 to 2.2, those of whole sequences from 0.2 to 1.8
MOVED = 0.018

GRPO = {"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.2}
MASKED = {"mask_truncated_completions": True}
CASES: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "grpo_masked": GRPO | MASKED,
    "dr_grpo": GRPO | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dr_grpo_masked": GRPO | MASKED | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": GRPO | {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo_masked": GRPO | MASKED | {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": GRPO | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": GRPO | {"loss_type": "cispo", "epsilon_high": 5.0},
    "dual_clip": GRPO | {"delta": 1.3},
    "rloo": {"epsilon": 0.2, "epsilon_high": 0.2},
}


def main(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    old, theta = weights()
    batch = completions()
    tensors = {
        f"{kind}/{name}": value for kind, set_ in (("old", old), ("theta", theta)) for name, value in set_.items()
    }
    cases = {}
    for name, settings in CASES.items():
        cases[name], gradients = measured(name, settings, batch, old, theta)
        tensors |= {f"{name}/{key}": value for key, value in gradients.items()}
    result = {
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES}, "model": MODEL,
        "temperature": TEMPERATURE, "longest": LONGEST, **batch, "cases": cases,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trl.json").write_text(json.dumps(result, indent=1) + "\n")
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "trl.safetensors")


def weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The old policy and theta, by numpy's generator, whose numbers do not change with versions."""
    rng, old, theta = np.random.default_rng(11), {}, {}
    for name, shape in sorted((name, tuple(p.shape)) for name, p in blank().named_parameters()):
        base = 1.0 if name.endswith("norm.weight") else 0.0
        old[name] = torch.from_numpy(base + 0.25 * rng.standard_normal(shape))
        theta[name] = old[name] + torch.from_numpy(MOVED * rng.standard_normal(shape))
    return old, theta


def blank() -> Any:
    return AutoModelForCausalLM.from_config(Qwen3Config(**MODEL), dtype=torch.float64)


def completions() -> dict[str, Any]:
    rng = np.random.default_rng(12)
    prompts = [rng.integers(1, WORDS, 2 + row).tolist() for row in range(len(LENGTHS))]
    drawn = [
        [
            rng.integers(1, WORDS, n).tolist() if n == LONGEST else [*rng.integers(1, WORDS, n - 1).tolist(), EOS]
            for n in group
        ]
        for group in LENGTHS
    ]
    return {"prompts": prompts, "completions": drawn, "rewards": REWARDS}


def measured(
    name: str,
    settings: dict[str, Any],
    batch: dict[str, Any],
    old: dict[str, torch.Tensor],
    theta: dict[str, torch.Tensor],
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Advantages, the loss at the old weights and at theta, and the gradients there, `old_policy` and `moved`."""
    trainer = made(name, settings, batch)
    # what transformers' loop sets before a step
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    model.load_state_dict(old, strict=False)
    rows = [{"prompt": "x", "row": row} for row in range(len(LENGTHS)) for _ in range(GROUP)]
    inputs = trainer._generate_and_score_completions(rows)
    result: dict[str, Any] = {"settings": settings, "advantages": inputs["advantages"].tolist()}
    gradients = {}
    for place, weights_ in (("old_policy", old), ("moved", theta)):
        model.load_state_dict(weights_, strict=False)
        model.zero_grad()
        loss = trainer.compute_loss(model, inputs)
        assert loss.dtype == torch.float64
        loss.backward()
        result[f"loss_{place}"] = loss.item()
        if place == "moved" or name == "rloo":
            gradients |= {f"{place}/{key}": p.grad.clone() for key, p in model.named_parameters()}
    return result, gradients


def made(name: str, settings: dict[str, Any], batch: dict[str, Any]) -> Any:
    """A trainer whose completions are the batch's; its one dataset row is never looked at."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # pyright: ignore[reportMissingImports]

    trainer_of: Any
    config_of: Any
    trainer_of, config_of = (RLOOTrainer, RLOOConfig) if name == "rloo" else (GRPOTrainer, GRPOConfig)
    count = len(LENGTHS) * GROUP
    arguments = config_of(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, per_device_train_batch_size=count, num_generations=GROUP,
        gradient_accumulation_steps=1, num_iterations=2, beta=0.0, temperature=TEMPERATURE,
        max_completion_length=LONGEST, report_to=[], **settings,
    )  # fmt: skip

    def reward(completions: list[str], row: list[int], **_: Any) -> list[float | None]:
        return [value for group in REWARDS for value in group]

    trainer = trainer_of(
        model=blank(), reward_funcs=reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": ["x"]}), processing_class=tokenizer(),
    )  # fmt: skip
    prompts = [prompt for prompt in batch["prompts"] for _ in range(GROUP)]
    drawn = [completion for group in batch["completions"] for completion in group]
    texts = [""] * count
    handed = (prompts, drawn, texts) if name == "rloo" else (prompts, drawn, None, texts, None, {}, None, [])
    trainer._generate = lambda _: handed
    return trainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": EOS, "<pad>": WORDS - 1} | {chr(96 + i): i for i in range(1, WORDS - 1)}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
