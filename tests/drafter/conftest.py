"""A tiny float64 policy, its completions through the engine, and heads for it."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.rollout.engine import Engine
from respec.types import Ask, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish

WORDS = 40
SAMPLING = Sampling(24, 0.8)


@pytest.fixture(scope="session")
def policy() -> Policy:
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    use_packed_attention(model)
    words = {f"w{i}": i for i in range(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), eos_token="w1", pad_token="w0"
    )
    return Policy(model, tokenizer, (1,), 0, 128)


@pytest.fixture(scope="session")
def rollouts(policy: Policy) -> tuple[Rollout, ...]:
    rng = random.Random(2)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, WORDS) for _ in range(n))) for row, n in enumerate((1, 3, 8, 13))]
    engine = Engine(publish(policy, "float64", 0), policy.tokenizer, policy.eos_token_ids, 3, 16)
    return engine.rollout([Ask(prompt, Stream.TRAIN, 0, 3) for prompt in prompts], SAMPLING)[0]


@pytest.fixture
def make_counts(rollouts):
    """Rollouts of these tokens."""

    def make(*completions: list[int]) -> list[Rollout]:
        return [dataclasses.replace(rollouts[0], token_T=np.array(tokens, np.int32)) for tokens in completions]

    return make
