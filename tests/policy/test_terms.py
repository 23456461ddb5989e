"""The terms beside the surrogate: one update against a gradient by hand, and what they put into rewards and advantages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from respec.config import PolicyConfig
from respec.models.load import Policy
from respec.policy.advantages import advantages
from respec.policy.learner import PolicyLearner
from respec.policy.logprobs import token_logprobs
from respec.policy.pack import pack
from respec.policy.terms import LossTerms, charged, logprobs_under, taught
from respec.types import Sample

ADVANTAGES = (1.0, -0.5, 0.25, -0.75, 0.0, 0.0)
TEMPERATURE = 0.8
KL, BONUS, DISTIL = 0.3, 0.05, 0.7


@pytest.fixture
def other(make_policy) -> Policy:
    """The same model with other weights: a reference, a teacher."""
    policy = make_policy()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    policy.model.requires_grad_(False)
    return policy


def laws(policy: Policy, sample: Sample) -> torch.Tensor:
    """Log-probabilities over the vocabulary at each completion token, by the model's own forward pass."""
    rollout = sample.scored.rollout
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_T.tolist()]])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def held(samples: tuple[Sample, ...], other: Policy) -> tuple[Sample, ...]:
    reference_R = logprobs_under(other.model, [sample.scored for sample in samples], TEMPERATURE, 40, 7)
    return tuple(dataclasses.replace(s, reference_T=r) for s, r in zip(samples, reference_R, strict=True))


def by_hand(policy: Policy, other: Policy, samples, estimator: str, divergence: str, kept: list[int]) -> torch.Tensor:
    """The token-mean loss over the samples `kept`, on policy."""
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for i in kept:
        rollout = samples[i].scored.rollout
        target_T = torch.from_numpy(rollout.token_T).long()[:, None]
        law_TV, other_TV = laws(policy, samples[i]), laws(other, samples[i])
        drawn_T, there_T = law_TV.gather(1, target_T)[:, 0], other_TV.gather(1, target_T)[:, 0]
        r_T = torch.exp(there_T - drawn_T)
        kl_T = {
            "k1": drawn_T - there_T,
            "k2": (drawn_T - there_T) ** 2 / 2,
            "k3": r_T - 1 - torch.log(r_T),
            "k3_weighted": torch.exp(drawn_T - drawn_T.detach()) * (r_T - 1 - torch.log(r_T)),
        }[estimator]
        entropy_T = -(law_TV.exp() * law_TV).sum(1)
        first, second = (law_TV, other_TV) if divergence == "reverse_kl" else (other_TV, law_TV)
        apart_T = (first.exp() * (first - second)).sum(1)
        surrogate_T = -float(samples[i].advantage_T[0]) * drawn_T
        loss = loss + (surrogate_T + KL * kl_T - BONUS * entropy_T + DISTIL * apart_T).sum()
        count += len(drawn_T)
    return loss / count


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", "reverse_kl"), ("k2", "reverse_kl"), ("k3", "forward_kl"), ("k3_weighted", "reverse_kl")],
)
def test_an_updates_gradient_is_that_by_hand(
    make_policy, make_samples, other, estimator: str, divergence: str, budget: int
) -> None:
    """With samples that have no advantage, which terms teach all the same, and one left out as truncated, which they do not."""
    samples = held(make_samples(ADVANTAGES, truncated=(1,)), other)
    policy, twin = make_policy(), make_policy()
    config = PolicyConfig(
        lr=0.01, aggregation="token_mean", grad_clip=1e9, mask_truncated=True, tokens_per_microbatch=budget, logit_chunk=3
    )  # fmt: skip
    terms = LossTerms(KL, estimator, BONUS, DISTIL, divergence, 0.5, other.model)
    stats = PolicyLearner(policy, config, 10, terms=terms).update(samples, TEMPERATURE)
    loss = by_hand(twin, other, samples, estimator, divergence, [0, 2, 3, 4, 5])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1e9)
    torch.optim.AdamW(twin.model.parameters(), lr=0.01, weight_decay=0.0).step()
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-6)  # the reference's log-probabilities are float32
    for (name, mine), theirs in zip(policy.model.named_parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=name)
    assert set(stats.term) == {"kl", "entropy_bonus", divergence}
    assert stats.term["entropy_bonus"] == pytest.approx(BONUS * stats.entropy, rel=1e-9)
    assert all(weight.grad is None for weight in other.model.parameters())


def test_the_terms_are_of_laws_without_truncation(make_policy, make_samples, other) -> None:
    """What top-k kept is the surrogate's matter: neither the KL nor its gradient knows of it."""

    def kept(sample: Sample) -> Sample:
        rollout = dataclasses.replace(
            sample.scored.rollout, kept_logmass_T=np.full(len(sample.advantage_T), -0.5, np.float32)
        )
        return dataclasses.replace(sample, scored=dataclasses.replace(sample.scored, rollout=rollout))

    samples = held(make_samples([0.0] * 6), other)
    whole, cut = (
        PolicyLearner(make_policy(), PolicyConfig(), 10, terms=LossTerms(kl=KL)).update(given, TEMPERATURE)
        for given in (samples, [kept(sample) for sample in samples])
    )
    assert whole.grad_norm == pytest.approx(cut.grad_norm, rel=1e-6) and whole.grad_norm > 0
    assert whole.term["kl"] == pytest.approx(cut.term["kl"], rel=1e-6)


def test_a_reference_that_is_the_policy_teaches_nothing_at_first(make_policy, make_samples) -> None:
    samples = held(make_samples([0.0] * 6), make_policy())
    stats = PolicyLearner(make_policy(), PolicyConfig(), 10, terms=LossTerms(kl=KL)).update(samples, TEMPERATURE)
    assert abs(stats.term["kl"]) < 1e-12 and stats.grad_norm < 1e-5


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_a_frozen_models_logprobs_come_in_the_order_of_the_rollouts(make_samples, other, budget: int) -> None:
    samples = make_samples(ADVANTAGES)
    found_R = logprobs_under(other.model, [sample.scored for sample in samples], TEMPERATURE, budget, 5)
    for sample, found_T in zip(samples, found_R, strict=True):
        (batch,) = pack([sample], 999, TEMPERATURE)
        np.testing.assert_allclose(found_T, token_logprobs(other.model, batch, 99)[0].numpy(), rtol=0, atol=1e-6)
        assert found_T.dtype == np.float32


def test_in_the_reward_a_completion_is_charged_the_sum_of_its_tokens(make_samples) -> None:
    scored = [dataclasses.replace(sample.scored, reward=0.1 * i) for i, sample in enumerate(make_samples([0.0] * 4))]
    reference_R = [item.rollout.logprob_T - np.float32(0.25 * (i + 1)) for i, item in enumerate(scored)]
    paid = charged(scored, reference_R, KL, "k1")
    length = np.array([len(item.rollout.token_T) for item in scored])
    assert [item.reward for item in paid] == [item.reward for item in scored]  # the task's own is left as it is
    for i, item in enumerate(paid):
        assert item.token_reward_T is not None
        np.testing.assert_allclose(item.token_reward_T, -KL * 0.25 * (i + 1), rtol=1e-5)
    reward = 0.1 * np.arange(4) - KL * 0.25 * np.arange(1, 5) * length
    expected = reward - reward.mean()
    found = [float(sample.advantage_T[0]) for sample in advantages(paid, "group_without_std")]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_teachers_advantage_is_token_by_token_beside_the_rewards(make_samples) -> None:
    samples = make_samples([1.0, -2.0])
    teacher_R = [np.linspace(-3, -1, len(s.advantage_T)).astype(np.float32) for s in samples]
    for weight, reward_weight in ((0.5, 2.0), (1.0, 0.0)):
        for sample, teacher_T, result in zip(
            samples, teacher_R, taught(samples, teacher_R, weight, reward_weight), strict=True
        ):
            expected = reward_weight * sample.advantage_T - weight * (sample.scored.rollout.logprob_T - teacher_T)
            np.testing.assert_allclose(result.advantage_T, expected, rtol=1e-5)
            assert result.advantage_T.dtype == np.float32


def test_what_is_left_out_is_not_in_the_loss_that_is_shown(make_policy, make_samples, other) -> None:
    samples = held(make_samples([0.0] * 6, truncated=(1, 4)), other)
    config = PolicyConfig(aggregation="token_mean", mask_truncated=True)
    terms = LossTerms(KL, "k2", BONUS, DISTIL, "reverse_kl", 0.5, other.model)
    stats = PolicyLearner(make_policy(), config, 10, terms=terms).update(samples, TEMPERATURE)
    expected = by_hand(make_policy(), other, samples, "k2", "reverse_kl", [0, 2, 3, 5])
    assert stats.loss == pytest.approx(expected.item(), rel=1e-6)
