"""An engine that gets every k-th update's weights: when it does, and what a checkpoint holds of the ones it has."""

from __future__ import annotations

import pytest
import torch

from respec.config import ModelConfig
from respec.models.load import Policy, load_policy
from respec.weights.behind import Behind


@pytest.fixture
def policy() -> Policy:
    return load_policy(ModelConfig(path="builtin:demo", device="cpu"))


def moved(policy: Policy) -> None:
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(1.0)


def norm(policy: Policy) -> torch.Tensor:
    return policy.model.model.norm.weight.detach().clone()


def test_every_kth_step_and_the_last() -> None:
    assert [step for step in range(1, 9) if Behind(3, {}).due(step, last=8)] == [3, 6, 8]
    assert all(Behind(1, {}).due(step, last=8) for step in range(1, 9))


def test_in_step_with_the_learner_nothing_is_kept(policy: Policy) -> None:
    behind = Behind(1, {})
    with behind.lent(policy, 5) as version:
        assert version == 5
    behind.keep(policy, 6)
    assert behind.state_dict() == {}


def test_the_engine_is_built_again_around_the_weights_it_had(policy: Policy) -> None:
    behind, begun = Behind(3, {}), norm(policy)
    with behind.lent(policy, 0) as version:
        assert version == 0
    moved(policy)
    now = norm(policy)
    again = Behind(3, behind.state_dict())
    with again.lent(policy, 2) as version:
        assert version == 0 and torch.equal(norm(policy), begun)
    assert torch.equal(norm(policy), now)
    again.keep(policy, 3)
    moved(policy)
    with Behind(3, again.state_dict()).lent(policy, 4) as version:
        assert version == 3 and torch.equal(norm(policy), now)


def test_a_fault_meanwhile_leaves_the_policy_its_own(policy: Policy) -> None:
    behind = Behind(2, {})
    behind.keep(policy, 0)
    moved(policy)
    now = norm(policy)
    with pytest.raises(OSError), behind.lent(policy, 1):
        raise OSError
    assert torch.equal(norm(policy), now)
