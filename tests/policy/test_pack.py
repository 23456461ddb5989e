"""Packing: every token once and in its place, budgets kept, nothing left to chance."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from respec.errors import TaskError
from respec.policy.pack import bins, pack


def test_every_token_is_where_the_indices_say(make_samples) -> None:
    samples = make_samples([0.5 + i for i in range(10)], truncated=(3,))
    seen = []
    for batch in pack(samples, 40, 0.7):
        assert batch.temperature == 0.7
        assert batch.start_S[0] == 0 and batch.start_S[-1] == len(batch.token_N)
        for s in range(len(batch.truncated_S)):
            begin, end = int(batch.start_S[s]), int(batch.start_S[s + 1])
            mine = batch.sequence_C == s
            value = float(batch.advantage_C[mine][0])
            (sample,) = [x for x in samples if x.advantage_T[0] == np.float32(value)]
            rollout = sample.scored.rollout
            whole = [*rollout.prompt.token_ids, *rollout.token_T.tolist()]
            assert batch.token_N[begin:end].tolist() == whole
            assert batch.position_N[begin:end].tolist() == list(range(len(whole)))
            assert batch.target_C[mine].tolist() == rollout.token_T.tolist()
            first = begin + len(rollout.prompt.token_ids) - 1
            assert batch.predict_C[mine].tolist() == list(range(first, end - 1))
            np.testing.assert_array_equal(batch.rollout_logprob_C[mine].numpy(), rollout.logprob_T)
            assert bool(batch.truncated_S[s]) == rollout.truncated
            seen.append(rollout.key)
    assert sorted(seen) == sorted(sample.scored.rollout.key for sample in samples)


def test_truncated_sampling_is_in_the_rollout_logprob(make_samples) -> None:
    (sample,) = make_samples([1.0])
    rollout = dataclasses.replace(sample.scored.rollout, kept_logmass_T=np.full(2, -0.25, np.float32))
    (batch,) = pack([dataclasses.replace(sample, scored=dataclasses.replace(sample.scored, rollout=rollout))], 99, 1.0)
    np.testing.assert_allclose(batch.rollout_logprob_C.numpy(), rollout.logprob_T + 0.25, rtol=1e-6)
    assert (batch.kept_logmass_C == -0.25).all()


def test_bins_keep_the_budget_and_fall_in_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    filled = bins(lengths, 64)
    flat = [index for part in filled for index in part]
    assert sorted(flat) == list(range(200))
    assert all(sum(lengths[i] for i in part) <= 64 for part in filled)
    assert [lengths[i] for i in flat] == sorted(lengths, reverse=True)


def test_a_sequence_above_the_budget_is_alone() -> None:
    assert bins([3, 50, 3, 70], 10) == [[3], [1], [0, 2]]


def test_same_samples_same_batches(make_samples) -> None:
    first, second = pack(make_samples([1.0] * 9), 30, 1.0), pack(make_samples([1.0] * 9), 30, 1.0)
    assert len(first) == len(second) > 1
    assert all(
        torch.equal(a.token_N, b.token_N) and torch.equal(a.start_S, b.start_S)
        for a, b in zip(first, second, strict=True)
    )
    assert pack([], 30, 1.0) == ()


def test_a_prompt_without_tokens_is_refused(make_samples) -> None:
    (sample,) = make_samples([1.0])
    prompt = dataclasses.replace(sample.scored.rollout.prompt, token_ids=())
    scored = dataclasses.replace(sample.scored, rollout=dataclasses.replace(sample.scored.rollout, prompt=prompt))
    with pytest.raises(TaskError, match="row 0: the prompt has no tokens"):
        pack([dataclasses.replace(sample, scored=scored)], 30, 1.0)
