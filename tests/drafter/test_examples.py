"""What is captured from rollouts is what the engine decoded with, and the target's processed law."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from respec.drafter.examples import capture, passes, top_law
from respec.rollout.kv_cache import KVCache
from respec.rollout.sampling import process
from respec.types import Sampling
from respec.weights.publish import publish

TAPS = (2, 3, 4)
SAMPLING = Sampling(24, 0.8)


def test_hidden_states_and_laws_are_those_that_decoding_sees(policy, rollouts):
    examples = capture(policy.model, TAPS, rollouts, SAMPLING, 8, tokens_per_pass=60)
    decoder = publish(policy, "float64", 0)
    assert len(examples) == len(rollouts)
    for example, rollout in zip(examples, rollouts, strict=True):
        tokens = np.array([*rollout.prompt.token_ids, *rollout.token_T])
        assert example.token_L.tolist() == tokens.tolist() and example.prompt == len(rollout.prompt.token_ids)
        slot = np.zeros(len(tokens), np.int64)
        done = decoder.hidden(tokens, slot, np.arange(len(tokens)), KVCache(decoder.shape, 1, 64), None, TAPS)
        assert done.taps is not None and not example.taps_LT.requires_grad
        # the decoder hands hidden states on in float32
        assert (example.taps_LT - done.taps).abs().max() < 1e-5
        logits = decoder.logits(done.hidden)[example.prompt - 1 : -1].double().numpy()
        for row, ids, p in zip(logits, example.token_CK, example.p_CK, strict=True):
            truth = process(row, SAMPLING).p
            assert np.abs(truth[ids.numpy()] - p.numpy()).max() < 1e-9
            assert p.min() >= np.sort(truth)[-8] - 1e-9


def test_targets_are_truncated_as_in_sampling():
    logits = torch.randn(20, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    for sampling in (
        Sampling(1, 0.7, top_k=5),
        Sampling(1, 1.0, top_p=0.8),
        Sampling(1, 0.9, min_p=0.1),
        Sampling(1, 0.9, 9, 0.9, 0.05),
    ):
        ids, p = top_law(logits, sampling, 40)
        whole = torch.zeros_like(logits).scatter_(1, ids, p)
        truth = np.array([process(row, sampling).p for row in logits.numpy()])
        assert np.abs(whole.numpy() - truth).max() < 1e-12, sampling


def test_weights_go_with_their_rollouts_and_empty_completions_are_left_out(policy, rollouts):
    empty = dataclasses.replace(rollouts[0], token_T=rollouts[0].token_T[:0])
    examples = capture(policy.model, TAPS, [rollouts[3], empty, rollouts[8]], SAMPLING, weights=[0.5, 1.0, 2.0])
    assert [e.weight for e in examples] == [0.5, 2.0]


def test_passes_cover_everything_once_within_the_budget():
    lengths = [5, 30, 7, 7, 29, 100, 3]
    parts = passes(lengths, 60)
    assert sorted(i for part in parts for i in part) == list(range(7))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= 60 for part in parts)
