"""Makes the demo model: a small Qwen3 of this project's own, warmed up on worked chains of sums.

    python examples/demo_model.py [--steps 1500] [--out src/respec/models/demo]

The tokenizer knows printable ASCII, one token a character, and the task's own pieces (" + ", ", leaving ", ...) as one token each. Training rows are
drawn apart from the held-out rows of examples/demo.toml, with the learner's own warm-up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from respec.config import ModelConfig, WarmupConfig, load_config
from respec.models.load import load_policy
from respec.policy.warmup import warm_up
from respec.tasks.task import load_task
from respec.tasks.worked import JOINTS

PIECES = (" + ", " - ", " * ", " / ", " = ", "<answer>", "</answer>", *JOINTS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Character level with the task's joints; decoding an encoding gives the text back."""
    words = ["<pad>", "<eos>", "<unk>", *PIECES, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    joint = "|".join(word.replace("+", r"\+").replace("*", r"\*") for word in PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{joint}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random weights, about two million."""
    torch.manual_seed(seed)
    eos: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--rows", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("src/respec/models/demo"))
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer()
        build_model(tokenizer, arguments.seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy = load_policy(ModelConfig(path=folder, device="cpu"))
    print(f"{sum(p.numel() for p in policy.model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    config = load_config(Path("examples/demo.toml"))
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    pairs = task.worked(arguments.rows)
    began = time.perf_counter()

    def report(step: int, loss: float) -> None:
        if step % 200 == 0:
            print(f"step {step:5d}  loss {loss:.4f}  {time.perf_counter() - began:5.0f} s", flush=True)

    recipe = WarmupConfig(steps=arguments.steps, batch_size=arguments.batch_size, lr=arguments.lr, warmup_steps=100)
    stats = warm_up(policy, pairs, recipe, arguments.seed, report)
    print(f"{stats.tokens:,} tokens in {stats.wall_s:.0f} s, last loss {stats.last_loss:.4f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(policy.model, torch.bfloat16)
    policy.model.save_pretrained(arguments.out)
    policy.tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
