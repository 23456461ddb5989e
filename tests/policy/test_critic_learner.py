"""The critic's learner: values in order, losses by hand, packing without effect, all or nothing, resumes bit for bit (law 8)."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from respec.config import Config, parse_config
from respec.errors import CheckpointError, ConfigError, NonFiniteError
from respec.policy.advantages import advantages
from respec.policy.critic_learner import CriticLearner, critic_learner, explained_variance, value_loss
from respec.policy.learner import PolicyLearner
from respec.types import Sampling, ScoredRollout


def configured(
    critic: dict | None = None, policy: dict | None = None, steps: int = 6, rollout: dict | None = None
) -> Config:
    tree = {"model": {"path": "x"}, "task": {"dataset": "chain_sum"}, "run": {"steps": steps}, "rollout": rollout or {}}
    return parse_config(tree | {"policy": {"algorithm": "ppo"} | (policy or {}), "critic": critic or {}})


@pytest.fixture
def scored(make_rollout) -> list[ScoredRollout]:
    """Nine completions of one prompt each: those of even rows are right; row 4 is truncated."""
    finish = {4: "length"}
    return [
        ScoredRollout(make_rollout(row, 0, 2 + 5 * row % 8, finish.get(row, "eos")), float(row % 2 == 0), {})
        for row in range(9)
    ]


def rollouts_of(items):
    return [item.rollout for item in items]


def test_value_loss_in_numbers() -> None:
    """V 0.9 against R 0: from 0.5 and at most 0.2 further is 0.7, so 0.81 / 2 stands. Against R 1: 0.09 / 2 bounds 0.01 / 2, and no gradient."""
    value_C = torch.tensor([0.9, 0.9, 0.6], dtype=torch.float64, requires_grad=True)
    before_C, return_C = torch.full((3,), 0.5).double(), torch.tensor([0.0, 1.0, 1.0]).double()
    loss_C, clipped_C = value_loss(value_C, before_C, return_C, 0.2)
    np.testing.assert_allclose(loss_C.detach(), [0.405, 0.045, 0.08], rtol=1e-12)
    assert clipped_C.tolist() == [False, True, False]
    loss_C.sum().backward()
    assert value_C.grad is not None
    np.testing.assert_allclose(value_C.grad, [0.9, 0.0, -0.4], rtol=1e-12)
    free_C, none_C = value_loss(value_C, before_C, return_C, 0.0)
    np.testing.assert_allclose(free_C.detach(), [0.405, 0.005, 0.08], rtol=1e-12)
    assert not none_C.any()


def test_explained_variance_in_numbers() -> None:
    returns = np.array([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 0.3), returns) == pytest.approx(0.0)
    assert explained_variance(np.array([0.25, 0.75, 0.75, 0.25]), returns) == pytest.approx(0.75)
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4)) is None


def test_values_are_in_the_rollouts_order_however_they_are_packed(make_policy, scored) -> None:
    rollouts = rollouts_of(scored)
    whole, cut = (
        CriticLearner(make_policy(), configured(policy={"tokens_per_microbatch": budget})) for budget in (4096, 16)
    )
    for learner in (whole, cut):
        torch.nn.init.constant_(learner._critic.line.weight, 0.1)
    for rollout, one, other in zip(rollouts, whole.values(rollouts), cut.values(rollouts), strict=True):
        assert len(one) == len(rollout.token_T) + 1
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        token_N = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_T]])
        alone = whole._critic.line(whole._critic.body(input_ids=token_N).last_hidden_state[0])[:, 0].detach().numpy()
        np.testing.assert_allclose(one, alone[len(rollout.prompt.token_ids) - 1 :], rtol=0, atol=1e-12)


def test_samples_carry_advantages_values_and_returns(make_policy, scored) -> None:
    """A new critic expects 0: the return of every token is the reward, at lambda 1; advantages have mean 0 and deviation 1 over tokens."""
    samples = advantages(scored, "gae", CriticLearner(make_policy(), configured({"lam": 1.0})))
    assert [s.scored for s in samples] == scored
    for item, sample in zip(scored, samples, strict=True):
        assert sample.value_T is not None and sample.return_T is not None and not sample.value_T.any()
        assert (sample.return_T == item.reward).all()
    every = np.concatenate([s.advantage_T for s in samples])
    assert every.mean() == pytest.approx(0, abs=1e-6) and every.std() == pytest.approx(1, abs=1e-6)
    raw = advantages(scored, "gae", CriticLearner(make_policy(), configured({"lam": 1.0, "whiten_advantages": False})))
    assert all((s.advantage_T == item.reward).all() for s, item in zip(raw, scored, strict=True))
    white = configured({"lam": 1.0, "whiten_rewards": True})
    returns = [s.return_T for s in advantages(scored, "gae", CriticLearner(make_policy(), white))]
    firsts = np.array([r[0] for r in returns if r is not None])
    assert firsts.mean() == pytest.approx(0, abs=1e-6) and firsts.std() == pytest.approx(1, abs=1e-6)


def test_only_a_truncated_completion_goes_on_and_only_when_asked(make_policy, scored) -> None:
    found = []
    for bootstrap in (False, True):
        learner = CriticLearner(make_policy(), configured({"lam": 0.0, "bootstrap_truncated": bootstrap}))
        torch.nn.init.constant_(learner._critic.line.bias, 0.25)
        lasts = [s.return_T[-1] for s in advantages(scored, "gae", learner) if s.return_T is not None]
        found.append([float(last) - item.reward for last, item in zip(lasts, scored, strict=True)])
    assert found == [[0.0] * 9, [0.0] * 4 + [0.25] + [0.0] * 4]


def test_vtrace_weighs_by_the_policy_as_it_is_now(make_policy, scored) -> None:
    """Rollouts that say they were drawn with another probability than the policy gives; those of its own weigh 1."""
    learner = CriticLearner(make_policy(), configured({"whiten_advantages": False}, {"estimator": "vtrace"}))
    off = learner.log_ratios(rollouts_of(scored))
    assert any(abs(ratio_T).max() > 0.1 for ratio_T in off)
    shifted = [r.logprob_T.astype(np.float64) + ratio_T for r, ratio_T in zip(rollouts_of(scored), off, strict=True)]
    own = [
        dataclasses.replace(s, rollout=dataclasses.replace(s.rollout, logprob_T=logprob_T))
        for s, logprob_T in zip(scored, shifted, strict=True)
    ]
    assert all(abs(ratio_T).max() < 1e-9 for ratio_T in learner.log_ratios(rollouts_of(own)))
    for sample in advantages(own, "vtrace", learner):
        np.testing.assert_allclose(sample.advantage_T[-1], sample.scored.reward, rtol=1e-6, atol=1e-6)
    for sample, ratio_T in zip(advantages(scored, "vtrace", learner), off, strict=True):
        want = min(1.0, np.exp(ratio_T[-1])) * sample.scored.reward
        np.testing.assert_allclose(sample.advantage_T[-1], want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match=r"set policy\.correction to 'none'"):
        CriticLearner(make_policy(), configured(policy={"estimator": "vtrace", "correction": "tis"}))


def test_log_ratios_are_at_the_temperature_each_rollout_was_drawn_at(make_policy, make_rollout) -> None:
    """Two rollouts of the same tokens, one at the run's temperature and one at its own: their ratios differ, each as if all were of its temperature."""
    own = dataclasses.replace(make_rollout(0, 0, 6), sampling=Sampling(6, 0.5))
    mixed, hot, cold = (
        CriticLearner(
            make_policy(), configured(policy={"estimator": "vtrace"}, rollout={"temperature": degree})
        ).log_ratios(rollouts)
        for degree, rollouts in (
            (1.0, [make_rollout(1, 0, 4), own, make_rollout(0, 0, 6)]),
            (1.0, [make_rollout(1, 0, 4), make_rollout(0, 0, 6)]),
            (0.5, [make_rollout(0, 0, 6)]),
        )
    )
    for got_T, want_T in zip(mixed, (hot[0], cold[0], hot[1]), strict=True):
        np.testing.assert_allclose(got_T, want_T, rtol=1e-12, atol=1e-12)
    assert abs(cold[0] - hot[1]).max() > 0.1


@pytest.mark.parametrize("kind", ["separate", "lora"])
def test_micro_batches_change_nothing_and_the_critic_learns(make_policy, scored, kind) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    ends = []
    for budget in (4096, 16):
        config = configured({"kind": kind, "lr": 0.01, "lam": 1.0}, {"tokens_per_microbatch": budget})
        learner = CriticLearner(make_policy(), config)
        losses = [learner.update(advantages(scored, "gae", learner)) for _ in range(40)]
        assert losses[-1].loss < 0.2 * losses[0].loss and losses[0].explained_variance == 0
        explained = losses[-1].explained_variance
        assert explained is not None and explained > 0.8 and losses[-1].lr == 0.01
        ends.append(learner.values(rollouts_of(scored)))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_epochs_clip_values_and_are_the_policys_unless_told(make_policy, scored) -> None:
    learner = CriticLearner(make_policy(), configured({"lr": 0.1, "value_clip": 0.01}, {"epochs": 4, "minibatches": 2}))
    stats = learner.update(advantages(scored, "gae", learner))
    assert learner._optimizer_steps == 8 and 0 < stats.clip_fraction < 1
    own = CriticLearner(make_policy(), configured({"epochs": 1, "minibatches": 3}, {"epochs": 4}))
    own.update(advantages(scored, "gae", own))
    assert own._optimizer_steps == 3


def test_the_policy_waits_while_the_critic_has_its_head_start(make_policy, scored) -> None:
    policy, config = make_policy(), configured({"head_start": 2, "lr": 0.01}, {"lr": 0.01})
    learner, critic = PolicyLearner(policy, config.policy, 6), CriticLearner(policy, config)
    before = copy.deepcopy(policy.model.state_dict())
    moved = []
    for _ in range(3):
        samples = advantages(scored, "gae", critic)
        stats = learner.update(samples, 1.0)
        assert critic.update(samples).grad_norm > 0 and stats.entropy > 0
        moved.append(any(not torch.equal(before[name], now) for name, now in policy.model.state_dict().items()))
    assert moved == [False, False, True]


@pytest.mark.parametrize("kind", ["separate", "lora"])
@pytest.mark.parametrize("at", [0, 2])
def test_goes_on_bit_for_bit_from_a_saved_state(make_policy, scored, kind, at) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    config = configured({"kind": kind, "lr": 0.01, "head_start": 3, "decay": "cosine"}, {"minibatches": 2})

    def go(learner: CriticLearner, steps: int) -> None:
        for _ in range(steps):
            learner.update(advantages(scored, "gae", learner))

    straight = CriticLearner(make_policy(), config)
    go(straight, at)
    held = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in straight.state_dict().items()
    }
    go(straight, 2)
    resumed = critic_learner(config, make_policy(), held)
    assert resumed is not None
    go(resumed, 2)
    one, other = straight.state_dict(), resumed.state_dict()
    assert one.keys() == other.keys() and straight.alone == resumed.alone
    assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_refusals(make_policy, scored, make_samples) -> None:
    assert critic_learner(configured(policy={"algorithm": "grpo"}), make_policy()) is None
    learner = CriticLearner(make_policy(), configured())
    with pytest.raises(ConfigError, match="'gae' needs a critic"):
        advantages(scored, "gae")
    with pytest.raises(ConfigError, match="the samples carry no values"):
        learner.update(make_samples([1.0, -1.0]))
    state = learner.state_dict()
    state.pop("weight.line.bias")
    with pytest.raises(CheckpointError, match="the checkpoint's critic is not the one"):
        learner.load_state_dict(state)
    before = {name: value.clone() for name, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    samples = [
        dataclasses.replace(s, return_T=np.full_like(s.advantage_T, np.inf)) for s in advantages(scored, "gae", learner)
    ]
    with pytest.raises(NonFiniteError, match="critic update"):
        learner.update(samples)
    assert all(torch.equal(before[name], torch.as_tensor(learner.state_dict()[name])) for name in before)
