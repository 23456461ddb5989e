"""Supervised warm-up: it learns, twice the same, on completions only, EOS included."""

from __future__ import annotations

import pytest
import torch

from respec.config import WarmupConfig
from respec.errors import NonFiniteError, TaskError
from respec.policy.warmup import warm_up
from respec.types import Prompt

PAIRS = [(Prompt(row, "", (row % 5 + 1, 7, 9)), "abc"[: row % 3 + 1]) for row in range(12)]


def test_learns_deterministically(make_policy) -> None:
    config = WarmupConfig(steps=30, batch_size=5, lr=0.02, warmup_steps=3)
    first, second, other = make_policy(), make_policy(), make_policy()
    seen: list[tuple[int, float]] = []
    stats = warm_up(first, PAIRS, config, 1, lambda step, loss: seen.append((step, loss)))
    warm_up(second, PAIRS, config, 1)
    warm_up(other, PAIRS, config, 2)
    assert stats.steps == 30 and [step for step, _ in seen] == list(range(1, 31))
    assert (stats.first_loss, stats.last_loss) == (seen[0][1], seen[-1][1])
    assert stats.last_loss < 0.5 * stats.first_loss
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


def test_loss_is_cross_entropy_of_the_solution_and_eos_alone(make_policy) -> None:
    policy = make_policy()
    stats = warm_up(policy, [(Prompt(0, "", (5, 7, 9)), "ab")], WarmupConfig(steps=1, batch_size=1), 0)
    logits = make_policy().model(input_ids=torch.tensor([[5, 7, 9, 1, 2]]), use_cache=False).logits[0, 2:]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2, 0]))
    assert stats.first_loss == pytest.approx(expected.item(), rel=1e-12)
    assert stats.tokens == 6


def test_no_steps_touch_nothing(make_policy) -> None:
    policy, fresh = make_policy(), make_policy()
    assert warm_up(policy, [], WarmupConfig(steps=0), 0).steps == 0
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), fresh.model.parameters(), strict=True))


def test_refusals(make_policy) -> None:
    config = WarmupConfig(steps=1, batch_size=1)
    with pytest.raises(TaskError, match="no worked solutions"):
        warm_up(make_policy(), [], config, 0)
    with pytest.raises(TaskError, match="row 4: prompt and worked solution are 104 tokens, the model's context is 64"):
        warm_up(make_policy(), [(Prompt(4, "", (1, 2, 3)), "a" * 100)], config, 0)
    with pytest.raises(TaskError, match="row 4: the prompt has no tokens"):
        warm_up(make_policy(), [(Prompt(4, "", ()), "a")], config, 0)
    broken = make_policy()
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="warm-up step 1"):
        warm_up(broken, PAIRS, config, 0)
