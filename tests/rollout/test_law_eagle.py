"""Law 1 for the EAGLE-3 drafter: chains and combs, both modes, started late, dropped, policy and head swapped in mid sequence."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from respec.models.eagle import create_head
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.types import Ask, Plan, Prompt, Sampling, Stream
from respec.weights.publish import publish

SAMPLING = Sampling(max_new_tokens=30, temperature=0.8)
CHAIN, COMB = Plan("eagle", 5, 1, 5), Plan("eagle", 4, 3, 10)


def asks(group: int = 3) -> list[Ask]:
    rng = random.Random(3)
    prompts = [
        Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(length))) for row, length in enumerate((1, 4, 19, 37))
    ]
    return [Ask(prompt, Stream.TRAIN, 0, group) for prompt in prompts]


def head(policy, seed: int = 0, drafted=range(1, 40)):
    return create_head(policy.model, drafted, seed)


def engine(policy, dtype: str = "bfloat16", mode="matching", max_batch: int = 8, drafting=None) -> Engine:
    decoder = publish(policy, dtype, 0)
    drafter = EagleDrafter(drafting or head(policy), decoder.shape.dtype)
    return Engine(decoder, policy.tokenizer, policy.eos_token_ids, 7, max_batch, 64, [drafter], mode)


class Scripted:
    """A planner that follows a script, over and over."""

    def __init__(self, plans) -> None:
        self._plans = itertools.cycle(plans)

    def plan(self, load) -> Plan:
        return next(self._plans)

    def observe(self, record) -> None:
        """Nothing."""


def equal(one, other, dtype: str) -> bool:
    same = all(np.array_equal(a.token_T, b.token_T) and a.finish == b.finish for a, b in zip(one, other, strict=True))
    gap = max(float(np.abs(a.logprob_T - b.logprob_T).max()) for a, b in zip(one, other, strict=True)) if same else 1.0
    return same and gap <= (1e-6 if dtype == "float64" else 0.0)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_chains_and_combs_give_the_tokens_and_bits_of_plain_decoding(make_policy, monkeypatch, family, dtype, native):
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    policy = make_policy(family, torch.float64 if dtype == "float64" else torch.float32)
    plain, _ = engine(policy, dtype).rollout(asks(), SAMPLING)
    for plan in (CHAIN, COMB):
        drafted, stats = engine(policy, dtype).rollout(asks(), SAMPLING, plan)
        assert equal(plain, drafted, dtype), plan
        assert 0 < stats.accepted < stats.drafted
