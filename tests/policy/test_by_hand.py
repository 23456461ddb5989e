"""Estimators, and the loss and gradient of whole algorithms, against definitions written out in float64 in plain loops, one sequence at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from respec.config import PolicyConfig
from respec.models.load import Policy
from respec.policy.advantages import advantages
from respec.policy.estimators import ESTIMATORS
from respec.policy.presets import resolve
from respec.types import Sample, ScoredRollout

# groups of three, two and four
REWARDS = ([1.0, 0.0, 0.4], [0.3, 0.9], [0.0, 0.0, 1.0, 0.7])
LENGTHS = ([3, 7, 2], [5, 1], [4, 4, 9, 2])
PRESETS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo")
LONGEST = 9


def by_hand(estimator: str) -> list[float]:
    if estimator == "group":
        return [(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4) for g in REWARDS for r in g]
    if estimator == "group_without_std":
        return [r - statistics.fmean(g) for g in REWARDS for r in g]
    if estimator == "leave_one_out":
        return [r - statistics.fmean([*g[:i], *g[i + 1 :]]) for g in REWARDS for i, r in enumerate(g)]
    # one number a token, as the paper's sums run over tokens
    groups = [(r, g, n) for g, ns in zip(REWARDS, LENGTHS, strict=True) for r, n in zip(g, ns, strict=True)]
    if estimator == "batch_whitened":
        tokens = [r for r, _, n in groups for _ in range(n)]
        return [(r - statistics.fmean(tokens)) / statistics.pstdev(tokens) for r, _, _ in groups]
    centred = [r - statistics.fmean(g) for r, g, _ in groups]
    tokens = [c for c, (_, _, n) in zip(centred, groups, strict=True) for _ in range(n)]
    return [c / math.sqrt(statistics.fmean(t * t for t in tokens)) for c in centred]


@pytest.mark.parametrize(
    "estimator", ["group", "group_without_std", "leave_one_out", "batch_whitened", "group_centred_batch_whitened"]
)
def test_estimators_in_float64(estimator: str) -> None:
    group_N = np.repeat([0, 1, 2], [len(group) for group in REWARDS])
    found = ESTIMATORS[estimator](np.concatenate(REWARDS), group_N, np.concatenate(LENGTHS))
    np.testing.assert_allclose(found, by_hand(estimator), rtol=1e-12, atol=1e-14)


def logprobs(policy: Policy, rollout: Any, temperature: float) -> torch.Tensor:
    """By transformers' own forward pass over one sequence, without packing."""
    prompt, tokens = rollout.prompt.token_ids, rollout.token_T.tolist()
    sequence = torch.tensor([[*prompt, *tokens]])
    logits = policy.model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1]
    law = torch.log_softmax(logits / temperature, dim=1)
    return torch.stack([law[t, token] for t, token in enumerate(tokens)])


def loss_by_hand(
    name: str, theta: Sequence[torch.Tensor], old: Sequence[torch.Tensor], advantage: Sequence[float]
) -> torch.Tensor:
    """The papers' sums over sequences and tokens."""
    lengths, total = [len(item) for item in theta], torch.zeros((), dtype=torch.float64)
    for now, before, a, length in zip(theta, old, advantage, lengths, strict=True):
        mean_gap = sum((n - b for n, b in zip(now, before, strict=True)), torch.zeros((), dtype=torch.float64)) / length
        for n, b in zip(now, before, strict=True):
            ratio = torch.exp(mean_gap if name == "gspo" else n - b)
            low, high = (1 - 3e-4, 1 + 4e-4) if name == "gspo" else (0.8, 1.2)
            if name == "rloo":
                value = -a * n
            elif name == "cispo":
                value = -min(ratio.item(), 5.0) * a * n
            else:
                value = -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)
            weight = {
                "grpo": 1 / (len(lengths) * length),
                "gspo": 1 / (len(lengths) * length),
                "dr_grpo": 1 / (len(lengths) * LONGEST),
                "rloo": 1 / (len(lengths) * LONGEST),
            }.get(name, 1 / sum(lengths))
            total = total + weight * value
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_of_an_algorithm(
    make_policy: Callable[[], Policy], make_rollout: Callable[..., Any], learn_at: Callable[..., Any], name: str
) -> None:
    scored = [
        ScoredRollout(make_rollout(row, k, length, "eos"), reward, {})
        for row, (group, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
        for k, (reward, length) in enumerate(zip(group, lengths, strict=True))
    ]
    config = PolicyConfig.model_validate({"algorithm": name})
    samples: Sequence[Sample] = advantages(scored, resolve(config).estimator)
    policy, rng = make_policy(), torch.Generator().manual_seed(3)
    old = {key: p.detach().clone() for key, p in policy.model.named_parameters()}
    theta = {
        key: value + 0.01 * torch.randn(value.shape, generator=rng, dtype=value.dtype) for key, value in old.items()
    }
    with torch.no_grad():
        before = [logprobs(policy, item.rollout, 0.8) for item in scored]
    ours = learn_at(policy, {"algorithm": name}, samples, 0.8, old, theta, LONGEST)

    reference = make_policy()
    reference.model.load_state_dict(theta, strict=False)
    now = [logprobs(reference, item.rollout, 0.8) for item in scored]
    loss = loss_by_hand(name, now, before, [float(sample.advantage_T[0]) for sample in samples])
    loss.backward()
    gap = torch.cat([torch.exp(n.detach() - b) for n, b in zip(now, before, strict=True)])
    assert gap.min() < 0.8 and gap.max() > 1.2, "clipping bites"
    assert ours.loss == pytest.approx(loss.item(), rel=1e-7, abs=1e-9)
    for key, parameter in reference.model.named_parameters():
        torch.testing.assert_close(ours.gradient[key], parameter.grad, rtol=1e-6, atol=1e-9)
