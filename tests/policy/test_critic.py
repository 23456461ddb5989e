"""The critic: where its values are read, what it shares with the policy, what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.config import CriticConfig
from respec.errors import ConfigError
from respec.policy import critic as module
from respec.policy.critic import KINDS, Critic, lora, separate
from respec.policy.learner import token_logprobs
from respec.policy.pack import lay_out


def batch_of(rollouts):
    return lay_out([r.prompt.token_ids for r in rollouts], [r.token_T for r in rollouts], 1.0)


def stirred(critic: Critic) -> Critic:
    """With a line that is not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.nn.init.normal_(critic.line.weight)
    return critic


@pytest.fixture(params=KINDS)
def make_critic(request, make_policy):
    if request.param == "lora":
        pytest.importorskip("peft")

    def make():
        policy = make_policy()
        return policy, stirred(KINDS[request.param](policy.model, CriticConfig(lora_rank=4), 5))

    return make


def test_a_new_critic_expects_nothing(make_policy, make_rollout) -> None:
    value_N = separate(make_policy().model, CriticConfig(), 0)(batch_of([make_rollout(0, 0, 5)]))
    assert not value_N.any()


def test_packed_values_are_those_of_the_sequence_alone(make_critic, make_rollout) -> None:
    """And those of transformers' own pass over it, unpacked."""
    _, critic = make_critic()
    rollouts = [make_rollout(row, 0, length) for row, length in ((0, 4), (1, 7), (2, 1))]
    together = critic(batch_of(rollouts)).split([len(r.prompt.token_ids) + len(r.token_T) for r in rollouts])
    for rollout, value_N in zip(rollouts, together, strict=True):
        batch = batch_of([rollout])
        torch.testing.assert_close(value_N, critic(batch), rtol=0, atol=1e-12)
        own = critic.line(critic.body(input_ids=batch.token_N[None]).last_hidden_state[0])[:, 0]
        torch.testing.assert_close(value_N, own, rtol=0, atol=1e-12)


def test_a_critic_learns_and_leaves_the_policy_as_it_is(make_critic, make_rollout) -> None:
    """Neither its weights nor its gradients (law 7, of a critic), also where the two share weights."""
    (plain, _), (policy, critic) = make_critic(), make_critic()
    batch = batch_of([make_rollout(0, 0, 6), make_rollout(1, 0, 3)])
    (critic(batch) - 1).square().sum().backward()
    assert all(p.grad is None for p in policy.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())
    learned = [p for p in critic.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learned) and any(
        p.grad.any() for p in learned if p is not critic.line.weight
    )
    for one in (plain, policy):
        token_logprobs(one.model, batch, 16)[0].sum().backward()
    for p, q in zip(plain.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(p, q) and p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_lora_reads_the_policys_weights_as_they_move_and_trains_few(make_policy, make_rollout) -> None:
    pytest.importorskip("peft")
    policy = make_policy()
    critic = stirred(lora(policy.model, CriticConfig(lora_rank=2), 5))
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert {p.data_ptr() for p in critic.parameters() if not p.requires_grad} <= own
    assert not {p.data_ptr() for p in critic.parameters() if p.requires_grad} & own
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert all("lora_" in name or name.startswith("line.") for name in trained) and len(trained) == 2 + 2 * 7 * 2
    batch = batch_of([make_rollout(0, 0, 5)])
    before = critic(batch).detach()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(before, critic(batch))


def test_beside_an_adapter_of_the_policys_own_the_critic_reads_what_lies_below_it(make_policy, make_rollout) -> None:
    """And trains its own alone."""
    peft = pytest.importorskip("peft")
    plain, policy = make_policy(), make_policy()
    own = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    peft.inject_adapter_in_model(own, policy.model.base_model)
    batch = batch_of([make_rollout(0, 0, 5)])
    one, other = (stirred(lora(p.model, CriticConfig(lora_rank=2), 5)) for p in (plain, policy))
    torch.testing.assert_close(one(batch), other(batch), rtol=0, atol=1e-12)
    trained = [name for name, p in other.named_parameters() if p.requires_grad]
    assert all(".critic." in name or name.startswith("line.") for name in trained)
    assert any(p.requires_grad for name, p in policy.model.named_parameters() if ".default." in name)


def test_lora_begins_where_its_seed_says(make_policy) -> None:
    pytest.importorskip("peft")
    state = torch.random.get_rng_state()
    one, same, other = (lora(make_policy().model, CriticConfig(), seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    pairs = [dict(critic.named_parameters()) for critic in (one, same, other)]
    assert all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])
    assert any(not torch.equal(pairs[0][name], pairs[2][name]) for name in pairs[0])


def test_without_peft_lora_says_what_to_do(make_policy, monkeypatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package peft, and it is not installed.*critic\.kind to 'separate'"
    ):
        lora(make_policy().model, CriticConfig(kind="lora"), 0)


def test_a_separate_critic_shares_nothing(make_policy) -> None:
    policy, state = make_policy(), torch.random.get_rng_state()
    critic = separate(policy.model, CriticConfig(), 0)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in policy.model.parameters()}
    name = "layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        critic.body.get_parameter(name).detach().numpy(), policy.model.base_model.get_parameter(name).detach().numpy()
    )
