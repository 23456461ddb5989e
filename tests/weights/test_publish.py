"""Snapshots at 8 bits: their log-probabilities are their own, near the policy's, and honest about how near."""

from __future__ import annotations

import numpy as np
import torch

from respec.config import ModelConfig
from respec.models.load import load_policy
from respec.policy.logprobs import token_logprobs
from respec.policy.pack import pack
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.types import PLAIN, Ask, Plan, Prompt, Sample, Sampling, ScoredRollout, Stream
from respec.weights.publish import publish


def test_int8_rollouts_are_the_8_bit_policys() -> None:
    """Stamped with its own log-probabilities: the learner finds a greater mismatch than the plain snapshot's; and as exact as any other:
    speculation changes no bit."""
    policy = load_policy(ModelConfig(path="builtin:demo", device="cpu"))
    tokens = policy.tokenizer("3 + 4 + 5\n", add_special_tokens=False).input_ids
    asks = [Ask(Prompt(0, "", tuple(tokens)), Stream.TRAIN, 0, 12)]
    gaps = {}
    for dtype in ("auto", "int8"):
        drafter = SuffixDrafter(1, 0.1, 10_000)
        engine = Engine(publish(policy, dtype, 0), policy.tokenizer, policy.eos_token_ids, 1, 8, drafters=[drafter])
        plain, _ = engine.rollout(asks, Sampling(60), PLAIN)
        drafter.learn(plain)
        drafted, stats = engine.rollout(asks, Sampling(60), Plan("suffix", 6, 1, 6))
        assert stats.accepted > 0
        for a, b in zip(plain, drafted, strict=True):
            assert np.array_equal(a.token_T, b.token_T) and np.array_equal(a.logprob_T, b.logprob_T)
        (batch,) = pack(
            [Sample(ScoredRollout(r, 0.0, {}), np.zeros(len(r.token_T), np.float32)) for r in plain], 10_000, 1.0
        )
        with torch.no_grad():
            own_C, _ = token_logprobs(policy.model, batch, 512)
        gaps[dtype] = float((own_C - batch.rollout_logprob_C).abs().mean())
    assert 1.2 * gaps["auto"] < gaps["int8"] < 0.5
