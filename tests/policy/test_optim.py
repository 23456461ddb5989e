"""The learning-rate schedule, point by point."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load, save

from respec.config import PolicyConfig
from respec.errors import CheckpointError, ConfigError
from respec.policy.learner import PolicyLearner
from respec.policy.optim import adamw, learning_rate


def test_warm_up_then_decay() -> None:
    def rate(step: int, decay: str, ratio: float = 0.0) -> float:
        return learning_rate(step, 9, 1.0, 4, decay, ratio)

    for decay in ("constant", "linear", "cosine"):
        assert [rate(step, decay) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [rate(step, "constant") for step in (4, 8, 99)] == [1.0, 1.0, 1.0]
    assert [rate(step, "linear") for step in range(4, 9)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rate(6, "cosine") == pytest.approx(0.5) and rate(8, "cosine") == pytest.approx(0.0)
    assert rate(8, "linear", 0.1) == pytest.approx(0.1) and rate(99, "cosine", 0.1) == pytest.approx(0.1)


def test_only_matrices_decay(make_policy) -> None:
    model = make_policy().model
    decayed, free = adamw(model, 0.1).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim >= 2 for p in decayed["params"])
    assert free["weight_decay"] == 0.0 and all(p.ndim == 1 for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert not any(torch.equal(p, q) for p in free["params"] for q in decayed["params"])


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw_8bit"])
def test_an_optimizer_that_is_not_installed_is_named_with_what_to_install(make_policy, monkeypatch, kind) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"policy.optimizer: .*pip install 'respec-rl\[8bit\]'"):
        PolicyLearner(make_policy(), PolicyConfig(optimizer=kind), 10)


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw_8bit"])
def test_eight_bit_moments_come_back_bit_for_bit(make_policy, make_samples, kind) -> None:
    """The one matrix of 4096 weights or more has its moments at 8 bits."""
    pytest.importorskip("bitsandbytes")
    samples, config = make_samples((1.0, -1.0, 0.5, -0.5)), PolicyConfig(optimizer=kind, lr=1e-3)
    policies = [make_policy(torch.float32, hidden=64), make_policy(torch.float32, hidden=64)]
    one, other = (PolicyLearner(policy, config, 10) for policy in policies)
    for _ in range(2):
        one.update(samples, 1.0)
    state = one.state_dict()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert any(value.dtype == torch.uint8 for value in tensors.values())
    policies[1].model.load_state_dict(policies[0].model.state_dict())
    other.load_state_dict({**state, **load(save(tensors))})
    for learner in (one, other):
        learner.update(samples, 1.0)
    weights = [policy.model.state_dict() for policy in policies]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(CheckpointError, match=r"does not fit the model or policy\.optimizer"):
        PolicyLearner(policies[0], PolicyConfig(), 10).load_state_dict(state)
