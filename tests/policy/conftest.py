"""Tiny float64 policies and hand-made samples for the policy learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from respec.config import PolicyConfig
from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.policy.learner import PolicyLearner
from respec.types import Prompt, Rollout, Sample, ScoredRollout, Stream

WORDS = 23


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """`make_policy(dtype=float64, hidden=16)`: the same random Qwen3 at every call, with a tokenizer of one token a letter."""

    def make(dtype: torch.dtype = torch.float64, hidden: int = 16) -> Policy:
        config = Qwen3Config(
            vocab_size=WORDS,
            hidden_size=hidden,
            intermediate_size=hidden + hidden // 2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        use_packed_attention(model)
        words = {"<eos>": 0} | {chr(96 + i): i for i in range(1, WORDS)}
        backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
        backend.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
        return Policy(model, tokenizer, (0,), 0, 64)

    return make


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """`make_rollout(row, sample, length, finish="eos", kept=0.0)`: random tokens fixed by row and sample."""

    def make(row: int, sample: int, length: int, finish: str = "eos", kept: float = 0.0) -> Rollout:
        rng = np.random.default_rng((row, sample))
        prompt = Prompt(row, "", tuple(np.random.default_rng(row).integers(1, WORDS, 3 + row % 3).tolist()))
        return Rollout(
            prompt=prompt,
            stream=Stream.TRAIN,
            draw=0,
            sample=sample,
            token_T=rng.integers(1, WORDS, length).astype(np.int32),
            logprob_T=(-3.0 + 0.3 * rng.standard_normal(length)).astype(np.float32),
            kept_logmass_T=np.full(length, kept, np.float32),
            entropy_T=np.zeros(length, np.float32),
            version_T=np.zeros(length, np.int32),
            proposer_T=np.zeros(length, np.uint8),
            round_T=np.zeros(length, np.int32),
            text="",
            finish=finish,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def make_samples(make_rollout: Callable[..., Rollout]) -> Callable[..., tuple[Sample, ...]]:
    """`make_samples(advantages, truncated=())`: one sample per advantage, four a row, lengths 2..9."""

    def make(advantages: Sequence[float], truncated: Sequence[int] = ()) -> tuple[Sample, ...]:
        made = []
        for i, advantage in enumerate(advantages):
            rollout = make_rollout(i // 4, i % 4, 2 + (5 * i) % 8, "length" if i in truncated else "eos")
            made.append(Sample(ScoredRollout(rollout, 0.0, {}), np.full(len(rollout.token_T), advantage, np.float32)))
        return tuple(made)

    return make


class WidestLogits(TorchDispatchMode):
    """Notes, as `rows`, the most rows any tensor with a vocabulary's columns had, a hidden size of 16 aside: the head's own."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.shape[1] == WORDS and leaf.shape[0] != 16:
                self.rows = max(self.rows, leaf.shape[0])
        return result


@pytest.fixture
def widest_logits() -> type[WidestLogits]:
    """`with widest_logits() as seen: ...`; then `seen.rows`."""
    return WidestLogits


@dataclass(frozen=True)
class Learned:
    """The loss of a batch, and its gradient by parameter."""

    loss: float
    gradient: Mapping[str, torch.Tensor]


def put(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])


@pytest.fixture
def learn_at() -> Callable[..., Learned]:
    """`learn_at(policy, settings, samples, temperature, old, theta, longest)`: the learner's loss and gradient at the weights `theta`, its old policy
    being `old`; `theta` None: at the old policy itself.

    All by the learner's public door: of two epochs, the weights are exchanged between; no step moves them, as the rate is next to nothing.
    """

    def learn(
        policy: Policy,
        settings: Mapping[str, Any],
        samples: Sequence[Sample],
        temperature: float,
        old: Mapping[str, torch.Tensor],
        theta: Mapping[str, torch.Tensor] | None,
        longest: int,
    ) -> Learned:
        epochs = 1 if theta is None else 2
        config = PolicyConfig.model_validate({"tokens_per_microbatch": 24, **settings, "epochs": epochs, "lr": 1e-30})
        put(policy, old)
        gradient: dict[str, torch.Tensor] = {}

        def between(done: int, total: int) -> None:
            if done == total:
                named = policy.model.named_parameters()
                gradient.update({name: p.grad.clone() for name, p in named if p.grad is not None})
            elif 2 * done == total and theta is not None:
                put(policy, theta)

        loss = PolicyLearner(policy, config, 1, longest).update(samples, temperature, between).loss
        if theta is not None:  # an update's loss is the mean over its epochs
            loss = 2 * loss - learn(policy, settings, samples, temperature, old, None, longest).loss
        return Learned(loss, gradient)

    return learn
