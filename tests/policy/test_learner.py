"""The learner: exact normalisation, law 6, mini-batches, resume, and what it refuses to let into the weights."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from respec.config import PolicyConfig
from respec.errors import CheckpointError, ConfigError, NonFiniteError, TaskError
from respec.models.load import Policy
from respec.policy.learner import PolicyLearner, token_logprobs
from respec.policy.pack import pack
from respec.types import Sample

ADVANTAGES = (1.0, -0.5, 0.25, -0.75, 2.0, -1.0, -1.5, 0.5, 0.3, 0.0, -0.3, 0.0)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_one_update_is_adamw_on_the_hand_written_gradient(make_policy: Callable[[], Policy], make_samples) -> None:
    samples = make_samples(ADVANTAGES)
    policy, other = make_policy(), make_policy()
    stats = PolicyLearner(policy, PolicyConfig(lr=0.01, grad_clip=0.5), 10).update(samples, 0.8)

    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        (batch,) = pack([sample], 999, 0.8)
        logprob_C, _ = token_logprobs(other.model, batch, 999)
        # On policy the clipped surrogate's gradient is that of advantage * log-probability.
        total = total - float(sample.advantage_T[0]) * logprob_C.mean() / len(samples)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
    torch.optim.AdamW(other.model.parameters(), lr=0.01, weight_decay=0.0).step()
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    assert stats.loss == pytest.approx(-np.mean(ADVANTAGES), rel=1e-6)  # ratios are all one
    after = weights(other)
    for name, value in weights(policy).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("extra", [{}, {"mask_truncated": True, "correction": "tis", "aggregation": "token_mean"}])
def test_accumulation_does_not_change_the_update(make_policy, make_samples, algorithm: str, extra: dict) -> None:
    samples = make_samples(ADVANTAGES, truncated=(0, 5))
    results = []
    for budget in (1, 25, 10_000):
        policy = make_policy()
        settings = {"algorithm": algorithm, "lr": 1e-3, "tokens_per_microbatch": budget, "loss_constant": 16, **extra}
        stats = PolicyLearner(policy, PolicyConfig.model_validate(settings), 10).update(samples, 1.0)
        results.append((stats, weights(policy)))
    for stats, after in results[1:]:
        assert stats.loss == pytest.approx(results[0][0].loss, rel=1e-12)
        assert stats.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-9)
        for name, value in after.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=0, atol=1e-9)


def weighed(samples: tuple[Sample, ...], weight: Callable[[int, int], np.ndarray | None]) -> tuple[Sample, ...]:
    """The samples with weights: of sample i, of so many tokens."""

    def one(i: int, sample: Sample) -> Sample:
        rollout = dataclasses.replace(sample.scored.rollout, weight_T=weight(i, len(sample.advantage_T)))
        return dataclasses.replace(sample, scored=dataclasses.replace(sample.scored, rollout=rollout))

    return tuple(one(i, sample) for i, sample in enumerate(samples))


def test_weights_of_one_leave_the_update_bit_for_bit(make_policy, make_samples) -> None:
    plain, ones = make_policy(), make_policy()
    config = PolicyConfig(lr=0.01, epochs=2, minibatches=2)
    PolicyLearner(plain, config, 10).update(make_samples(ADVANTAGES), 1.0)
    PolicyLearner(ones, config, 10).update(
        weighed(make_samples(ADVANTAGES), lambda i, length: np.ones(length, np.float32)), 1.0
    )
    assert same(weights(plain), weights(ones))


def test_a_tokens_weight_multiplies_what_it_adds_to_the_gradient(make_policy, make_samples) -> None:
    """Against the gradient by hand: weighted by powers of two, so that only the order of adding differs."""
    samples = make_samples(ADVANTAGES)

    def weight(i: int, length: int) -> np.ndarray:
        return (2.0 ** ((np.arange(length) + i) % 4)).astype(np.float32)

    policy, other = make_policy(), make_policy()
    config = PolicyConfig(lr=0.01, aggregation="token_mean", grad_clip=1e9)
    stats = PolicyLearner(policy, config, 10).update(weighed(samples, weight), 1.0)
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        (batch,) = pack([sample], 999, 1.0)
        logprob_C, _ = token_logprobs(other.model, batch, 999)
        weight_C = torch.from_numpy(weight(i, len(logprob_C)).astype(np.float64))
        total = total - float(sample.advantage_T[0]) * (weight_C * logprob_C).sum()
    (total / sum(len(s.advantage_T) for s in samples)).backward()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 1e9)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-9)


def test_law_6_equal_rewards_leave_the_weights_bit_for_bit(make_policy, make_samples) -> None:
    policy = make_policy()
    learner = PolicyLearner(policy, PolicyConfig(lr=0.1, weight_decay=0.1, minibatches=2, epochs=2), 10)
    learner.update(make_samples(ADVANTAGES), 1.0)  # so that the optimizer has momentum
    before = weights(policy)
    stats = learner.update(make_samples([0.0] * 8), 1.0)
    assert same(before, weights(policy))
    assert stats.minibatches == 0 and stats.grad_norm == 0.0 and stats.loss == 0.0
    assert stats.entropy > 0 and stats.tokens == sum(len(s.advantage_T) for s in make_samples([0.0] * 8))


def test_idle_samples_count_in_the_mean_but_not_in_the_gradient(make_policy, make_samples) -> None:
    samples = make_samples([1.0, -1.0, 0.5, -0.5])
    idle = make_samples([0.0] * 8)[4:]
    alone, together = make_policy(), make_policy()
    a = PolicyLearner(alone, PolicyConfig(), 10).update(samples, 1.0)
    b = PolicyLearner(together, PolicyConfig(), 10).update(samples + idle, 1.0)
    assert b.grad_norm == pytest.approx(a.grad_norm / 2, rel=1e-9)  # half of the sequences teach nothing


def test_mismatch_and_entropy_are_the_old_policys(make_policy, make_samples) -> None:
    samples = make_samples(ADVANTAGES)
    (batch,) = pack(samples, 10_000, 1.0)
    with torch.no_grad():
        logprob_C, entropy_C = token_logprobs(make_policy().model, batch, 64)
    gap_C = (logprob_C - batch.rollout_logprob_C).abs()
    for config in (PolicyConfig(), PolicyConfig(minibatches=3, epochs=2, lr=0.05)):
        stats = PolicyLearner(make_policy(), config, 10).update(samples, 1.0)
        assert stats.mismatch_mean == pytest.approx(gap_C.mean().item(), rel=1e-9)
        assert stats.mismatch_max == pytest.approx(gap_C.max().item(), rel=1e-9)
        assert stats.entropy == pytest.approx(entropy_C.mean().item(), rel=1e-9)
        assert stats.tokens == len(gap_C)


def test_mismatch_is_free_of_truncation(make_policy, make_samples) -> None:
    def truncate(sample: Sample) -> Sample:
        kept = np.full(len(sample.advantage_T), -0.5, np.float32)
        rollout = dataclasses.replace(sample.scored.rollout, kept_logmass_T=kept)
        return dataclasses.replace(sample, scored=dataclasses.replace(sample.scored, rollout=rollout))

    samples = make_samples(ADVANTAGES)
    plain = PolicyLearner(make_policy(), PolicyConfig(correction="tis"), 10).update(samples, 1.0)
    kept = PolicyLearner(make_policy(), PolicyConfig(correction="tis"), 10).update([truncate(s) for s in samples], 1.0)
    assert kept.mismatch_mean == pytest.approx(plain.mismatch_mean, rel=1e-6)
    assert kept.loss == pytest.approx(plain.loss, rel=1e-6)


def test_minibatches_and_epochs_move_off_policy_and_clip(make_policy, make_samples) -> None:
    config = PolicyConfig(lr=0.05, minibatches=3, epochs=2, clip_low=0.05, clip_high=0.05)
    seen: list[tuple[int, int]] = []
    stats = PolicyLearner(make_policy(), config, 10).update(
        make_samples(ADVANTAGES), 1.0, lambda done, total: seen.append((done, total))
    )
    assert stats.minibatches == 6
    assert 0 < stats.clip_fraction < 1 and stats.ratio_mean != 1.0
    assert seen[-1] == (24, 24) and [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_an_update_lowers_the_loss_it_descends(make_policy, make_samples) -> None:
    samples, policy = make_samples(ADVANTAGES), make_policy()
    (batch,) = pack(samples, 10_000, 1.0)

    def likelihood() -> float:
        with torch.no_grad():
            return float((token_logprobs(policy.model, batch, 64)[0] * batch.advantage_C).sum())

    before = likelihood()
    PolicyLearner(policy, PolicyConfig(lr=1e-3, aggregation="token_mean"), 10).update(samples, 1.0)
    assert likelihood() > before


def test_resumed_goes_on_bit_for_bit(make_policy, make_samples) -> None:
    config = PolicyConfig(lr=0.01, minibatches=2, epochs=2, warmup_steps=3, decay="cosine", weight_decay=0.01)
    straight = make_policy(torch.float32)
    learner = PolicyLearner(straight, config, 6)
    for _ in range(3):
        learner.update(make_samples(ADVANTAGES), 1.0)
    halfway = weights(straight)
    # As a checkpoint keeps it: tensors as safetensors, plain numbers as JSON.
    tensors = {key: value for key, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    numbers = {key: value for key, value in learner.state_dict().items() if not isinstance(value, torch.Tensor)}
    state = load(save(tensors)) | json.loads(json.dumps(numbers))

    resumed = make_policy(torch.float32)
    with torch.no_grad():
        for name, parameter in resumed.model.named_parameters():
            parameter.copy_(halfway[name])
    other = PolicyLearner(resumed, config, 6)
    other.load_state_dict(state)
    for _ in range(3):
        a = learner.update(make_samples(ADVANTAGES), 1.0)
        b = other.update(make_samples(ADVANTAGES), 1.0)
        assert dataclasses.replace(a, wall_s=0.0) == dataclasses.replace(b, wall_s=0.0)
    assert same(weights(straight), weights(resumed))
    for key, value in learner.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()[key])), key


def test_a_fresh_state_round_trips_and_a_foreign_one_is_refused(make_policy, make_samples) -> None:
    learner = PolicyLearner(make_policy(), PolicyConfig(), 6)
    learner.load_state_dict(learner.state_dict())
    learner.update(make_samples(ADVANTAGES), 1.0)
    state = learner.state_dict()
    wrong = {key: value for key, value in state.items() if key != "exp_avg.model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"1 differences, first: exp_avg\.model\.norm\.weight"):
        learner.load_state_dict(wrong)
    with pytest.raises(CheckpointError, match="does not fit"):
        learner.load_state_dict({})


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_never_reaches_the_weights(make_policy, make_samples, poison: str) -> None:
    policy = make_policy()
    learner = PolicyLearner(policy, PolicyConfig(lr=0.1), 10)
    learner.update(make_samples(ADVANTAGES), 1.0)
    before, state = weights(policy), copy.deepcopy(learner.state_dict())
    samples = list(make_samples(ADVANTAGES))
    if poison == "loss":
        samples[2] = dataclasses.replace(samples[2], advantage_T=np.full_like(samples[2].advantage_T, np.inf))
    else:
        policy.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match="weights are as before"):
        learner.update(samples, 1.0)
    assert same(before, weights(policy))
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[k])) for k, v in learner.state_dict().items())


def test_constant_needs_its_divisor(make_policy, make_samples) -> None:
    config = PolicyConfig(algorithm="dr_grpo")
    with pytest.raises(ConfigError, match=r"policy\.loss_constant"):
        PolicyLearner(make_policy(), config, 10)
    by_engine = PolicyLearner(make_policy(), config, 10, max_new_tokens=32).update(make_samples(ADVANTAGES), 1.0)
    by_config = PolicyLearner(make_policy(), config.model_copy(update={"loss_constant": 16}), 10, max_new_tokens=32)
    assert by_config.update(make_samples(ADVANTAGES), 1.0).loss == pytest.approx(2 * by_engine.loss, rel=1e-9)


def test_a_step_without_samples_is_refused(make_policy) -> None:
    with pytest.raises(TaskError, match="no samples to learn from"):
        PolicyLearner(make_policy(), PolicyConfig(), 10).update([], 1.0)
