"""The drafter's losses against a float64 reference over the whole vocabulary, values and gradients; and their edges."""

from __future__ import annotations

import math

import pytest
import torch

from respec.drafter.losses import BY_TOKEN, e2e_tv, log_law, overlap, with_tail


def reference(name: str, p, logits, temperature: float) -> torch.Tensor:
    """Straight from the definitions; the tail is what tokens beyond the first K weigh together."""
    q = torch.softmax(logits / temperature, dim=1)
    stands = torch.minimum(p, q).sum(dim=1)
    if name == "kl":
        return (p * (p.log() - q.log())).sum(dim=1)
    return 1 - stands if name == "tv" else -stands.log()


def laws(temperature: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(7, 11, generator=generator, dtype=torch.float64), dim=1)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    return p, logits, log_law(logits, torch.arange(11).repeat(7, 1), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_values_and_gradients_are_those_of_the_definition(name: str, temperature: float):
    p, logits, logq = laws(temperature)
    mine = BY_TOKEN[name](with_tail(p), logq)
    truth = reference(name, p, logits, temperature)
    # the empty tail is held at 1e-8
    assert torch.allclose(mine, truth, rtol=0, atol=1e-7)
    (gradient,) = torch.autograd.grad(mine.sum(), logits, retain_graph=True)
    (true_gradient,) = torch.autograd.grad(truth.sum(), logits)
    assert torch.allclose(gradient, true_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_gradients_with_a_tail_and_undraftable_tokens_are_those_of_differences(name: str):
    generator = torch.Generator().manual_seed(1)
    p = with_tail(torch.softmax(torch.randn(5, 20, generator=generator, dtype=torch.float64), dim=1)[:, :6])
    index = torch.tensor([0, 4, -1, 2, -1, 7]).repeat(5, 1)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: BY_TOKEN[name](p, log_law(x, index, 0.8)), (logits,))


def test_the_bucket_bounds_divergence_from_below_and_overlap_from_above():
    p, logits, whole = laws()
    top, index = p.topk(4, dim=1)
    bucketed = log_law(logits, index, 1.0)
    assert (BY_TOKEN["kl"](with_tail(top), bucketed) <= BY_TOKEN["kl"](with_tail(p), whole) + 1e-7).all()
    assert (overlap(with_tail(top), bucketed) >= overlap(with_tail(p), whole) - 1e-7).all()


def test_equal_laws_are_at_no_distance():
    logits = torch.randn(3, 6, dtype=torch.float64)
    p, logq = with_tail(torch.softmax(logits, 1)), log_law(logits, torch.arange(6).repeat(3, 1), 1.0)
    for name, loss in BY_TOKEN.items():
        assert loss(p, logq).abs().max() < 1e-7, name


def test_what_cannot_be_drafted_costs_overlap_but_leaves_the_divergence_finite():
    p, logq = torch.tensor([[0.7, 0.3, 0.0]]), log_law(torch.zeros(1, 4), torch.tensor([[-1, 2]]), 1.0)
    assert BY_TOKEN["tv"](p, logq).item() == pytest.approx(0.75)
    assert BY_TOKEN["kl"](p, logq).item() == pytest.approx(math.log(4))
    nothing = log_law(torch.zeros(1, 4), torch.tensor([[-1, -1]]), 1.0)
    assert BY_TOKEN["kl"](torch.tensor([[0.7, 0.3, 0.0]]), nothing).item() == 0
    assert BY_TOKEN["lk"](torch.tensor([[0.7, 0.3, 0.0]]), nothing).item() == pytest.approx(-math.log(1e-6))


def test_e2e_is_one_minus_the_share_of_a_draft_that_is_accepted():
    overlaps = torch.tensor([[0.9, 0.5, 0.25], [0.8, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    exists = torch.tensor([[True, True, True], [True, True, False]])
    loss = e2e_tv(overlaps, exists)
    assert loss.tolist() == pytest.approx([1 - (0.9 + 0.45 + 0.1125) / 3, 1 - (0.8 + 0.24) / 2])
    (gradient,) = torch.autograd.grad(loss.sum(), overlaps)
    expected = [[-(1 + 0.5 + 0.125) / 3, -(0.9 + 0.225) / 3, -0.45 / 3], [-(1 + 0.3) / 2, -0.8 / 2, 0]]
    assert torch.allclose(gradient, torch.tensor(expected, dtype=torch.float64))
