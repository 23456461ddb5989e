"""What is seen in the policy learner's own forward pass is what a pass of one's own would give, and looking changes nothing (law 7)."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from respec.config import PolicyConfig
from respec.drafter.examples import capture
from respec.drafter.watcher import Watcher
from respec.models.load import Policy
from respec.policy.learner import PolicyLearner
from respec.types import Sample, Sampling, ScoredRollout

TAPS = (2, 3, 4)
SAMPLING = Sampling(24, 0.8, top_k=12, top_p=0.95)
# few tokens to a pass and few rows to a chunk, so that sequences and chunks cross
SMALL = {"tokens_per_microbatch": 60, "logit_chunk": 7, "lr": 1e-2}


@pytest.fixture
def samples(rollouts) -> list[Sample]:
    advantages = np.random.default_rng(0).normal(size=len(rollouts))
    advantages[[1, 4]] = 0.0
    return [
        Sample(ScoredRollout(rollout, 0.0, {}), np.full(len(rollout.token_T), a, np.float32))
        for rollout, a in zip(rollouts, advantages, strict=True)
    ]


def learned(policy: Policy, samples, dtype: torch.dtype, watch: Watcher | None, **settings) -> dict[str, torch.Tensor]:
    """The weights after an update, and the moments, which after one step are the gradients scaled."""
    own = dataclasses.replace(policy, model=copy.deepcopy(policy.model).to(dtype=dtype))  # pyright: ignore[reportCallIssue]
    learner = PolicyLearner(own, PolicyConfig(**SMALL | settings), 5)
    learner.update(samples, SAMPLING.temperature, None, watch)
    moments = {name: value for name, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    return moments | dict(own.model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("several", [{}, {"epochs": 2, "minibatches": 3}])
def test_looking_on_changes_no_bit_of_the_policys_gradients(policy, samples, dtype, several):
    """Law 7."""
    watch = Watcher(TAPS, SAMPLING, {s.scored.rollout.key: 1.0 for s in samples}, 0)
    seen, alone = (learned(policy, samples, dtype, watching, **several) for watching in (watch, None))
    assert len(watch.examples) == len(samples)
    assert seen.keys() == alone.keys() and all(torch.equal(seen[name], alone[name]) for name in alone)
    assert not any(e.taps_LT.requires_grad or e.p_CK.requires_grad for e in watch.examples)


@pytest.mark.parametrize("several", [{}, {"epochs": 2, "minibatches": 3}])
def test_what_is_seen_is_what_a_pass_of_the_policy_before_the_update_gives(policy, samples, rollouts, several):
    weights = {rollout.key: 1.0 + place for place, rollout in enumerate(rollouts)}
    watch = Watcher(TAPS, SAMPLING, weights, 6, top=8)
    learned(policy, samples, torch.float64, watch, **several)
    truth = capture(policy.model, TAPS, rollouts, SAMPLING, 8, [*weights.values()])
    assert len(watch.examples) == len(truth)
    for ours, theirs in zip(watch.examples, truth, strict=True):
        assert torch.equal(ours.token_L, theirs.token_L) and ours.prompt == theirs.prompt
        assert (ours.weight, ours.version) == (theirs.weight, 6)
        assert (ours.taps_LT - theirs.taps_LT).abs().max() < 1e-10
        assert torch.equal(ours.token_CK, theirs.token_CK) and (ours.p_CK - theirs.p_CK).abs().max() < 1e-10


def test_only_what_is_wanted_is_kept_in_the_order_asked_for(policy, samples, rollouts):
    wanted = [rollouts[7], rollouts[2], rollouts[11]]
    watch = Watcher(TAPS, SAMPLING, {rollout.key: 1.0 for rollout in wanted}, 0, torch.float32, 8)
    learned(policy, samples, torch.float32, watch)
    truth = capture(policy.model, TAPS, wanted, SAMPLING, 8)
    for ours, theirs in zip(watch.examples, truth, strict=True):
        assert torch.equal(ours.token_L, theirs.token_L) and ours.taps_LT.dtype == torch.float32
        assert (ours.p_CK - theirs.p_CK).abs().max() < 1e-4
