"""A budget of tokens: exactly so many, in order, the last one cut; whose parts teach what the whole would have taught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from respec.config import PolicyConfig
from respec.errors import ConfigError
from respec.models.load import Policy
from respec.policy.budget import samples_from, spend, state_of, tokens_of
from respec.policy.learner import PolicyLearner, token_logprobs
from respec.policy.pack import pack
from respec.types import Sample

ADVANTAGES = (1.0, -0.5, 0.25, -0.75, 2.0, -1.0, -1.5, 0.5)  # lengths 2, 7, 4, 9, 6, 3, 8, 5


def gradient(
    policy: Policy, samples: tuple[Sample, ...], config: PolicyConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient that the learner steps on: with SGD's first moment, AdamW keeps a tenth of it."""
    learner = PolicyLearner(policy, config, 10)
    loss = learner.update(samples, 1.0).loss
    state = learner.state_dict()
    moments = {name: state[f"exp_avg.{name}"] for name, _ in policy.model.named_parameters()}
    return loss, {name: moment / 0.1 for name, moment in moments.items() if isinstance(moment, torch.Tensor)}


def config(budget: int, **others: object) -> PolicyConfig:
    settings = {"algorithm": "c3po", "correction": "none", "token_budget": budget, "lr": 1e-9, "grad_clip": 1e9}
    return PolicyConfig.model_validate(settings | others)


def test_a_budget_is_spent_exactly_and_in_order(make_samples) -> None:
    samples = make_samples(ADVANTAGES)
    now, later = spend(samples, 16)
    assert [len(s.advantage_T) for s in now] == [2, 7, 4, 3] and tokens_of(now) == 16
    assert [len(s.advantage_T) for s in later] == [6, 6, 3, 8, 5]
    # what was whole is the very same
    assert all(a is b for a, b in zip(now[:3], samples, strict=False)) and all(
        a is b for a, b in zip(later[1:], samples[4:], strict=True)
    )
    head, tail, whole = now[-1].scored.rollout, later[0].scored.rollout, samples[3].scored.rollout
    assert head.prompt == whole.prompt and head.key == tail.key == whole.key
    assert tail.prompt.token_ids == (*whole.prompt.token_ids, *whole.token_T[:3].tolist())
    for name in ("token_T", "logprob_T", "kept_logmass_T", "version_T", "entropy_T"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(head, name), getattr(tail, name)]), getattr(whole, name), err_msg=name
        )


@pytest.mark.parametrize("budget", [2, 9, 44, 100])
def test_where_a_budget_ends_with_a_response_nothing_is_cut(make_samples, budget: int) -> None:
    samples = make_samples(ADVANTAGES)
    now, later = spend(samples, budget)
    assert (*now, *later) == samples and tokens_of(now) == min(budget, 44)


def test_step_by_step_everything_is_trained_on_once(make_samples) -> None:
    """One answer may last for several steps."""
    waiting, tokens = make_samples(ADVANTAGES), list[tuple[int, int]]()
    while waiting:
        now, waiting = spend(waiting, 4)
        assert tokens_of(now) == 4 or not waiting
        tokens += [(s.scored.rollout.prompt.row, int(t)) for s in now for t in s.scored.rollout.token_T]
    whole = make_samples(ADVANTAGES)
    assert tokens == [(s.scored.rollout.prompt.row, int(t)) for s in whole for t in s.scored.rollout.token_T]


def test_golden_gradient_of_a_budget(make_policy: Callable[[], Policy], make_samples) -> None:
    """-sum over the tokens of A log theta, over the budget, were there as many tokens or not (on policy all ratios are 1)."""
    samples = make_samples(ADVANTAGES)
    for budget in (44, 100):
        policy, other = make_policy(), make_policy()
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            (batch,) = pack([sample], 999, 1.0)
            total = total - float(sample.advantage_T[0]) * token_logprobs(other.model, batch, 999)[0].sum() / budget
        total.backward()
        loss, got = gradient(policy, samples, config(budget))
        assert loss == pytest.approx(-sum(float(s.advantage_T.sum()) for s in samples) / budget, rel=1e-12)
        for name, parameter in other.model.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_parts_of_a_cut_step_have_the_gradient_of_the_whole(make_policy, make_samples) -> None:
    """Where no update lies between them: each divided by the budget, they add up to the whole divided by it."""
    samples = make_samples(ADVANTAGES)
    now, later = spend(samples, 16)
    whole, first, second = (gradient(make_policy(), part, config(16))[1] for part in (samples, now, later))
    for name, expected in whole.items():
        # RMS norms compute in float32, whatever the weights are
        torch.testing.assert_close(first[name] + second[name], expected, rtol=1e-5, atol=1e-7)


def test_mini_batches_share_the_budget(make_policy, make_samples) -> None:
    """Each optimizer step is divided by its part of the budget; the update's mean loss is then that of one step."""
    samples = make_samples(ADVANTAGES)
    alone = gradient(make_policy(), samples, config(44))[0]
    assert gradient(make_policy(), samples, config(44, minibatches=4))[0] == pytest.approx(alone, rel=1e-6)


def test_tokens_of_an_older_policy_are_weighed_by_the_correction(make_policy, make_samples) -> None:
    """old / rollout at most the cap: the log-probabilities are those that a sample was drawn with, not the trainer's."""
    samples = make_samples(ADVANTAGES[:2])
    policy = make_policy()
    expected = 0.0
    for sample in samples:
        (batch,) = pack([sample], 999, 1.0)
        old_C = token_logprobs(policy.model, batch, 999)[0].detach()
        weight_C = torch.exp(old_C - batch.rollout_logprob_C).clamp(max=1.5)
        assert 0 < (weight_C == 1.5).sum() < len(weight_C) or len(weight_C) < 4
        expected -= float((weight_C * batch.advantage_C).sum()) / 20
    loss, _ = gradient(make_policy(), samples, config(20, correction="tis", correction_cap=1.5))
    assert loss == pytest.approx(expected, rel=1e-9)


def test_a_budget_without_a_number_is_refused(make_policy) -> None:
    with pytest.raises(ConfigError, match=r"policy.aggregation 'budget' divides by policy.token_budget"):
        PolicyLearner(make_policy(), PolicyConfig(algorithm="c3po"), 10)


@pytest.mark.parametrize("weighted", [False, True])
def test_law_8_what_waits_is_kept_bit_for_bit_in_what_is_learned_from(make_policy, make_samples, weighted) -> None:
    samples = make_samples(ADVANTAGES, truncated=(2,))
    if weighted:
        samples = tuple(
            dataclasses.replace(s, scored=dataclasses.replace(s.scored, rollout=dataclasses.replace(
                s.scored.rollout, weight_T=np.linspace(0, 1, len(s.advantage_T), dtype=np.float32)
            )))
            for s in samples
        )  # fmt: skip
    _, later = spend(samples, 5)
    state = state_of(later)
    flat = {key: v for key, v in state.items() if isinstance(v, torch.Tensor)}
    nested = {name: load(save(state[name])) for name in ("rollout", "sample")}
    taken = samples_from({**load(save(flat)), **nested})
    assert [s.scored.rollout.key for s in taken] == [s.scored.rollout.key for s in later]
    for mine, theirs in zip(pack(taken, 12, 1.0), pack(later, 12, 1.0), strict=True):
        for name, value in vars(theirs).items():
            assert (
                torch.equal(getattr(mine, name), value)
                if isinstance(value, torch.Tensor)
                else getattr(mine, name) == value
            )
    assert [s.scored.rollout.version_T.tolist() for s in taken] == [s.scored.rollout.version_T.tolist() for s in later]
    assert samples_from(state_of(())) == ()
