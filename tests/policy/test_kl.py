"""What each estimator's gradient is, in the loss and in the reward: by enumerating every token, so that no chance is in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from respec.policy.kl import KL_ESTIMATORS

V = 5


def law(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def kl(a_V: torch.Tensor, b_V: torch.Tensor) -> torch.Tensor:
    return (a_V.exp() * (a_V - b_V)).sum(-1)


def true_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """Of KL(theta || reference) and of KL(reference || theta), by theta's logits."""
    logit_V, reference_V = law(1, V).requires_grad_(), law(2, V).log_softmax(0)
    theta_V = logit_V.log_softmax(0)
    (forward,) = torch.autograd.grad(kl(theta_V, reference_V), logit_V, retain_graph=True)
    (backward,) = torch.autograd.grad(kl(reference_V, theta_V), logit_V)
    return forward, backward


def in_the_loss(estimator: str, drawn_V: torch.Tensor) -> torch.Tensor:
    """The mean gradient of a token's loss over tokens drawn by `drawn_V`."""
    logit_V, reference_V = law(1, V).requires_grad_(), law(2, V).log_softmax(0)
    value_V = KL_ESTIMATORS[estimator](logit_V.log_softmax(0), drawn_V, reference_V)
    return torch.autograd.grad((drawn_V.exp() * value_V).sum(), logit_V)[0]


def in_the_reward(estimator: str) -> torch.Tensor:
    """The mean of estimator x gradient of log theta: what charging it to the reward adds to the loss."""
    logit_V, reference_V = law(1, V).requires_grad_(), law(2, V).log_softmax(0)
    theta_V = logit_V.log_softmax(0)
    value_V = KL_ESTIMATORS[estimator](theta_V, theta_V, reference_V).detach()
    return torch.autograd.grad((theta_V.exp().detach() * value_V * theta_V).sum(), logit_V)[0]


EXPECTED: dict[tuple[str, str], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ("loss", "k1"): lambda forward, backward: torch.zeros_like(forward),
    ("loss", "k2"): lambda forward, backward: forward,
    ("loss", "k3"): lambda forward, backward: backward,
    ("loss", "k3_weighted"): lambda forward, backward: forward,
    ("reward", "k1"): lambda forward, backward: forward,
    ("reward", "k3"): lambda forward, backward: forward - backward,
}


@pytest.mark.parametrize(("place", "estimator"), sorted(EXPECTED))
def test_the_gradient_on_policy(place: str, estimator: str) -> None:
    forward, backward = true_gradients()
    found = in_the_reward(estimator) if place == "reward" else in_the_loss(estimator, law(1, V).log_softmax(0))
    torch.testing.assert_close(found, EXPECTED[place, estimator](forward, backward), rtol=1e-10, atol=1e-12)


def test_what_is_not_the_kls_gradient_is_far_from_it() -> None:
    forward, _ = true_gradients()
    for found in (
        in_the_loss("k1", law(1, V).log_softmax(0)),
        in_the_loss("k3", law(1, V).log_softmax(0)),
        in_the_reward("k2"),
        in_the_reward("k3"),
    ):
        assert (found - forward).norm() > 0.2 * forward.norm()


def test_off_policy_only_the_weighted_one_is_right() -> None:
    forward, _ = true_gradients()
    stale_V = law(3, V).log_softmax(0)
    torch.testing.assert_close(in_the_loss("k3_weighted", stale_V), forward, rtol=1e-10, atol=1e-12)
    for estimator in ("k1", "k2", "k3"):
        assert (in_the_loss(estimator, stale_V) - forward).norm() > 0.2 * forward.norm(), estimator


def test_values_k2_alone_is_biased_and_k1_alone_is_negative() -> None:
    theta_V, reference_V = law(1, V).log_softmax(0), law(2, V).log_softmax(0)
    values = {name: estimator(theta_V, theta_V, reference_V) for name, estimator in KL_ESTIMATORS.items()}
    mean = {name: float((theta_V.exp() * value_V).sum()) for name, value_V in values.items()}
    true = float(kl(theta_V, reference_V))
    assert mean["k1"] == pytest.approx(true, rel=1e-12) and mean["k3"] == pytest.approx(true, rel=1e-12)
    assert mean["k3_weighted"] == pytest.approx(true, rel=1e-12) and abs(mean["k2"] - true) > 0.05 * true
    assert min(values["k2"].min(), values["k3"].min()) >= 0 > values["k1"].min()


def test_by_hand() -> None:
    theta, old, reference = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.2, -1.5))
    # r = exp(-0.5) = 0.60653066, r - 1 - log r = 0.10653066; theta / old = exp(0.2) = 1.22140276
    golden = {"k1": 0.5, "k2": 0.125, "k3": 0.10653065971, "k3_weighted": 0.13011684}
    for name, value in golden.items():
        assert KL_ESTIMATORS[name](theta, old, reference).item() == pytest.approx(value, rel=1e-7), name


def test_summed_in_the_reward_it_is_the_sequences_kl_and_token_by_token_each_tokens_own() -> None:
    """Two tokens, the second's law after each first one. What a loss by token leaves out: that the first chooses where the second is drawn."""
    first_V, second_VV = law(4, V).requires_grad_(), law(5, V, V).requires_grad_()
    reference_V, reference_VV = law(6, V).log_softmax(0), law(7, V, V).log_softmax(1)
    one_V, two_VV = first_V.log_softmax(0), second_VV.log_softmax(1)
    whole = kl(one_V, reference_V) + (one_V.exp() * kl(two_VV, reference_VV)).sum()
    own = kl(one_V, reference_V) + (one_V.exp().detach() * kl(two_VV, reference_VV)).sum()
    in_reward = in_loss = torch.zeros((), dtype=torch.float64)
    k1, k2 = KL_ESTIMATORS["k1"], KL_ESTIMATORS["k2"]
    for a, b in itertools.product(range(V), range(V)):
        pair, there = torch.stack([one_V[a], two_VV[a, b]]), torch.stack([reference_V[a], reference_VV[a, b]])
        chance = pair.sum().exp().detach()
        in_reward = in_reward + chance * k1(pair, pair, there).sum().detach() * pair.sum()
        in_loss = in_loss + chance * k2(pair, pair, there).sum()
    for found, expected in ((in_reward, whole), (in_loss, own)):
        ours = torch.autograd.grad(found, (first_V, second_VV), retain_graph=True)
        theirs = torch.autograd.grad(expected, (first_V, second_VV), retain_graph=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_on_policy_the_weighted_one_has_k2s_gradient_token_by_token() -> None:
    theta_V, reference_V = law(1, V).log_softmax(0).requires_grad_(), law(2, V).log_softmax(0)
    for_each = [
        torch.autograd.grad(KL_ESTIMATORS[name](theta_V, theta_V.detach(), reference_V).sum(), theta_V)[0]
        for name in ("k2", "k3_weighted")
    ]
    torch.testing.assert_close(*for_each, rtol=1e-10, atol=1e-12)
