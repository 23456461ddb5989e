"""Losses against a reference written out token by token in plain float64 Python, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from respec.policy.losses import AGGREGATIONS, CORRECTIONS, SURROGATES, Bounds, Counts

# Three sequences of 3, 1 and 2 tokens. Ratios theta / old: 1.6, 0.5, 1.0, 1.1, 0.75, 1.35.
SEQUENCE = [0, 0, 0, 1, 2, 2]
RATIO = [1.6, 0.5, 1.0, 1.1, 0.75, 1.35]
OLD = [-1.2, -0.3, -2.5, -0.9, -1.7, -0.1]
ADVANTAGE = [0.8, -0.4, 1.5, -1.1, -2.0, 0.6]
ROLLOUT = [-1.1, -1.4, -2.5, -0.95, -1.5, -0.2]
BOUNDS = Bounds(clip_low=0.2, clip_high=0.3, correction_cap=2.0)
COUNTS = Counts(sequences=3, tokens=6, constant=10)


def reference_token(surrogate: str, i: int) -> tuple[float, float]:
    """Loss of token i and its derivative by theta's log-probability."""
    ratio, advantage = RATIO[i], ADVANTAGE[i]
    if surrogate == "reinforce":
        return -advantage * (OLD[i] + math.log(ratio)), -advantage
    free = ratio * advantage
    held = min(max(ratio, 0.8), 1.3) * advantage
    if free <= held:
        return -free, -ratio * advantage
    return -held, 0.0


def reference_weight(aggregation: str, i: int) -> float:
    if aggregation == "sequence_mean":
        return 1 / 3 / [3, 3, 3, 1, 2, 2][i]
    if aggregation == "token_mean":
        return 1 / 6
    return 1 / 3 / 10


def reference_correction(correction: str, i: int) -> float:
    return 1.0 if correction == "none" else min(math.exp(OLD[i] - ROLLOUT[i]), 2.0)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_loss_and_gradient_match_the_reference(surrogate: str, aggregation: str, correction: str) -> None:
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = (old_C + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    terms = SURROGATES[surrogate](theta_C, old_C, torch.tensor(ADVANTAGE, dtype=torch.float64), BOUNDS)
    weight_C = AGGREGATIONS[aggregation](torch.tensor(SEQUENCE), COUNTS)
    weight_C = weight_C * CORRECTIONS[correction](old_C, torch.tensor(ROLLOUT, dtype=torch.float64), BOUNDS)
    loss = (weight_C * terms.loss_C).sum()
    loss.backward()

    expected, slope = 0.0, []
    for i in range(6):
        value, derivative = reference_token(surrogate, i)
        factor = reference_weight(aggregation, i) * reference_correction(correction, i)
        expected += factor * value
        slope.append(factor * derivative)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert theta_C.grad is not None
    torch.testing.assert_close(theta_C.grad, torch.tensor(slope, dtype=torch.float64), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(terms.ratio_C, torch.tensor(RATIO, dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_golden_number_of_grpo() -> None:
    # Sequence 0: held 1.3 * 0.8, held 0.8 * -0.4, free 1.5 -> -(1.04 - 0.32 + 1.5) / 3 = -0.74
    # Sequence 1: free 1.1 * -1.1 -> 1.21.  Sequence 2: held 0.8 * -2, held 1.3 * 0.6 -> (1.6 - 0.78) / 2 = 0.41
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = old_C + torch.tensor(RATIO, dtype=torch.float64).log()
    terms = SURROGATES["ppo_clip"](theta_C, old_C, torch.tensor(ADVANTAGE, dtype=torch.float64), BOUNDS)
    loss = (AGGREGATIONS["sequence_mean"](torch.tensor(SEQUENCE), COUNTS) * terms.loss_C).sum()
    assert loss.item() == pytest.approx((-0.74 + 1.21 + 0.41) / 3, rel=1e-12)
    assert terms.clipped_C.tolist() == [True, True, False, False, True, True]


def test_truncated_importance_weights_are_capped() -> None:
    weight_C = CORRECTIONS["tis"](torch.tensor(OLD), torch.tensor(ROLLOUT), BOUNDS)
    assert weight_C[1] == 2.0  # exp(1.1) is above the cap
    assert weight_C.max() == 2.0 and weight_C[2] == 1.0


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_law_6_no_advantage_gives_exactly_no_gradient(surrogate: str) -> None:
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = (old_C + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    SURROGATES[surrogate](theta_C, old_C, torch.zeros(6, dtype=torch.float64), BOUNDS).loss_C.sum().backward()
    assert theta_C.grad is not None and (theta_C.grad == 0).all()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_weights_of_parts_are_those_of_the_whole(aggregation: str) -> None:
    whole = AGGREGATIONS[aggregation](torch.tensor(SEQUENCE), COUNTS)
    parts = [AGGREGATIONS[aggregation](torch.tensor(ids), COUNTS) for ids in ([0, 0, 0], [0, 1, 1])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=0.0)
