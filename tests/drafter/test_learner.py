"""The drafter learner: every loss improves its own aim; law 7; weights; nothing that is not finite gets in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from respec.drafter.distil import distil, draft_vocabulary
from respec.drafter.examples import capture
from respec.drafter.judge import judge
from respec.drafter.learner import DrafterLearner, LearnerSettings, drafter_loss
from respec.drafter.losses import LOSSES
from respec.drafter.unroll import unroll
from respec.errors import CheckpointError, ConfigError, NonFiniteError
from respec.models.eagle import create_head
from respec.types import Sampling

SAMPLING = Sampling(24, 0.8)


@pytest.fixture(scope="module")
def examples(policy, rollouts):
    return capture(policy.model, (2, 3, 4), rollouts, SAMPLING, 40)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_learns_what_the_policy_says_next(policy, examples, loss):
    head = create_head(policy.model, seed=1)
    settings = LearnerSettings(loss, depths=3, temperature=0.8, lr=3e-3)
    before = judge(head, examples, 3, 0.8).overlap_K
    learner = DrafterLearner(head, settings)
    stats = [learner.step(examples) for _ in range(30)]
    after = judge(head, examples, 3, 0.8).overlap_K
    assert stats[-1].loss < stats[0].loss and learner.updates == 30
    seen = stats[0].seen
    assert seen is not None and seen.overlap_K == pytest.approx(before)
    assert all(later > earlier + 0.1 for earlier, later in zip(before, after, strict=True))


def test_minibatches_of_any_size_give_one_gradient(policy, examples):
    heads = [create_head(policy.model, seed=1) for _ in range(2)]
    losses = [
        DrafterLearner(head, LearnerSettings(depths=3, tokens=tokens)).step(examples)
        for head, tokens in zip(heads, (40, 4000), strict=True)
    ]
    assert losses[0].loss == pytest.approx(losses[1].loss) and losses[0].grad_norm == pytest.approx(losses[1].grad_norm)


def test_a_rollout_without_weight_teaches_nothing(policy, examples):
    weighted = [dataclasses.replace(e, weight=0.0 if i % 2 else 2.0) for i, e in enumerate(examples)]
    kept = [e for e in weighted if e.weight]
    head = create_head(policy.model, seed=1)
    some, all_ = (drafter_loss(unroll(head, part, 3, 1.0), "kl", 0.8) for part in (kept, weighted))
    assert some.item() == pytest.approx(all_.item())


def test_training_the_drafter_leaves_the_policys_gradients_bit_for_bit(policy, rollouts):
    """Law 7."""
    model = policy.model

    def gradients(between) -> list[torch.Tensor]:
        model.zero_grad()
        token = torch.from_numpy(rollouts[5].token_T.astype("int64"))[None]
        loss = model(input_ids=token, labels=token, use_cache=False).loss
        between()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    weights = [parameter.detach().clone() for parameter in model.parameters()]
    learner = DrafterLearner(create_head(model, seed=1), LearnerSettings())
    alone = gradients(lambda: None)
    beside = gradients(lambda: learner.step(capture(model, (2, 3, 4), rollouts, SAMPLING)))
    assert learner.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    model.zero_grad()


def test_what_is_not_finite_does_not_reach_the_weights(policy, examples):
    head = create_head(policy.model, seed=1)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    bad = dataclasses.replace(examples[4], taps_LT=examples[4].taps_LT * torch.nan)
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        DrafterLearner(head, LearnerSettings()).step([*examples[:2], bad])
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


def test_an_update_of_several_steps_is_all_or_nothing(policy, examples):
    """The second part is bad: what the first taught goes too, and so do its moments; the update after it is as if neither had been."""
    settings = LearnerSettings(depths=3, temperature=0.8, lr=3e-3)
    bad = dataclasses.replace(examples[4], taps_LT=examples[4].taps_LT * torch.nan)
    ours, never = (DrafterLearner(create_head(policy.model, seed=1), settings) for _ in range(2))
    for learner in (ours, never):
        learner.update([examples[:3], examples[3:5]])
    with pytest.raises(NonFiniteError):
        ours.update([examples[5:8], [bad]])
    assert ours.updates == never.updates == 2
    for learner in (ours, never):
        stats = learner.update([examples[8:10], examples[10:]])
        assert [part.seen is None for part in stats] == [False, True]
    assert all(torch.equal(a, b) for a, b in zip(ours.head.parameters(), never.head.parameters(), strict=True))


def test_a_learner_goes_on_from_what_was_saved_bit_for_bit(policy, examples):
    settings = LearnerSettings(depths=3, temperature=0.8, lr=3e-3)
    whole = DrafterLearner(create_head(policy.model, seed=1), settings)
    for part in (examples[:6], examples[6:]):
        whole.step(part)
    first = DrafterLearner(create_head(policy.model, seed=1), settings)
    first.step(examples[:6])
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in first.state_dict().items()
    }
    second = DrafterLearner(create_head(policy.model, seed=9), settings)
    second.load_state_dict(state)
    second.step(examples[6:])
    assert second.updates == 2
    assert all(torch.equal(a, b) for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True))


def test_a_state_of_another_head_is_refused(policy):
    state = DrafterLearner(create_head(policy.model, range(20)), LearnerSettings()).state_dict()
    with pytest.raises(CheckpointError, match="the head that the run began with"):
        DrafterLearner(create_head(policy.model), LearnerSettings()).load_state_dict(state)


def test_an_unknown_loss_is_named():
    with pytest.raises(ConfigError, match="'mse'; known are kl, tv, lk, e2e_tv"):
        LearnerSettings("mse")


def test_distillation_reports_acceptance_on_what_it_has_not_seen(policy, rollouts):
    seen = []
    head = create_head(policy.model, seed=1)
    settings = LearnerSettings(depths=3, temperature=0.8, lr=3e-3)
    stats = distil(
        policy.model, head, rollouts[:9], rollouts[9:], SAMPLING, settings, 25, 6, on_step=lambda *at: seen.append(at)
    )
    assert [step for step, _ in seen] == list(range(1, 26)) and seen[-1][1] == stats.last_loss
    assert len(stats.acceptance_K) == 3 and stats.acceptance_K[0] > stats.before_K[0]
    again = create_head(policy.model, seed=1)
    repeated = distil(policy.model, again, rollouts[:9], rollouts[9:], SAMPLING, settings, 25, 6)
    assert repeated.acceptance_K == stats.acceptance_K


def test_the_draft_vocabulary_is_what_completions_use_most(make_counts):
    rollouts = make_counts([5, 5, 5, 9, 9, 2], [9, 5, 7])
    assert draft_vocabulary(rollouts, 2, 40) == (5, 9)
    assert draft_vocabulary(rollouts, 3, 40) == (2, 5, 9)
    assert draft_vocabulary(rollouts, 40, 40) is None
