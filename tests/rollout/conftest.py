"""Tiny models with random weights, sharp enough at a low temperature that drafts are sometimes right and sometimes wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.types import Prompt, Rollout, Stream

SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def make_policy(tokenizer):
    """A policy by family, dtype and seed."""

    def make(family: str = "qwen3", dtype: torch.dtype = torch.float32, seed: int = 0) -> Policy:
        torch.manual_seed(seed)
        extra = {"head_dim": 16} if family == "qwen3" else {}
        model = AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES, **extra)).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
        use_packed_attention(model)
        return Policy(model, tokenizer, (1,), 0, 512)

    return make


@pytest.fixture(scope="session")
def near():
    """A policy whose weights are another's with noise of this relative size: a drafter that is often right."""

    def make(policy: Policy, noise: float = 0.1) -> Policy:
        model = copy.deepcopy(policy.model)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                shaken = torch.randn(parameter.shape, generator=generator).to(parameter) * parameter.std() * noise
                parameter.add_(shaken if parameter.ndim > 1 else 0)
        return Policy(model, policy.tokenizer, policy.eos_token_ids, policy.pad_token_id, policy.context_length)

    return make


@pytest.fixture(scope="session")
def make_rollout():
    """A finished completion of these tokens, its other figures nought."""

    def make(row: int, tokens: Iterable[int], sample: int = 0, draw: int = 0) -> Rollout:
        token_T = np.array(list(tokens), np.int32)
        nought = np.zeros(len(token_T), np.float32)
        count = np.zeros(len(token_T), np.int32)
        return Rollout(
            Prompt(row, "", (3,)), Stream.TRAIN, draw, sample, token_T, nought, nought, nought, count, count.astype(np.uint8), count, "", "eos"
        )  # fmt: skip

    return make
