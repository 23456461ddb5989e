"""Losses against a reference written out token by token in plain float64 Python, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from respec.config import PolicyConfig
from respec.policy.corrections import CORRECTIONS
from respec.policy.losses import AGGREGATIONS, SURROGATES, Bounds, Counts
from respec.policy.presets import bounds_of

# Three sequences of 3, 1 and 2 tokens. Ratios theta / old: 1.6, 0.5, 1.0, 1.1, 0.75, 1.35.
SEQUENCE = [0, 0, 0, 1, 2, 2]
RATIO = [1.6, 0.5, 1.0, 1.1, 0.75, 1.35]
OLD = [-1.2, -0.3, -2.5, -0.9, -1.7, -0.1]
ADVANTAGE = [0.8, -0.4, 1.5, -1.1, -2.0, 0.6]
ROLLOUT = [-1.1, -1.4, -2.5, -0.95, -1.5, -0.2]
BOUNDS = Bounds(clip_low=0.2, clip_high=0.3, correction_cap=2.0)
COUNTS = Counts(sequences=3, tokens=6, constant=10, budget=8)


LENGTH = [3, 3, 3, 1, 2, 2]
MEMBERS = [[0, 1, 2], [3], [4, 5]]
DUAL = Bounds(clip_low=0.2, clip_high=0.3, correction_cap=2.0, dual_clip=1.05)
NARROW = Bounds(clip_low=0.04, clip_high=0.05, correction_cap=2.0)


def clipped(ratio: float, advantage: float, bounds: Bounds) -> tuple[float, float]:
    """PPO's loss and its derivative by log theta."""
    free, held = ratio * advantage, min(max(ratio, 1 - bounds.clip_low), 1 + bounds.clip_high) * advantage
    value, slope = (-free, -free) if free <= held else (-held, 0.0)
    if bounds.dual_clip is not None and advantage < 0 and value > -bounds.dual_clip * advantage:
        return -bounds.dual_clip * advantage, 0.0
    return value, slope


def reference_token(surrogate: str, i: int, bounds: Bounds) -> tuple[float, float]:
    """Loss of token i and its derivative by theta's log-probability."""
    ratio, advantage = RATIO[i], ADVANTAGE[i]
    if surrogate == "reinforce":
        return -advantage * (OLD[i] + math.log(ratio)), -advantage
    if surrogate == "cispo":
        weight = min(max(ratio, 1 - bounds.clip_low), 1 + bounds.clip_high)
        return -weight * advantage * (OLD[i] + math.log(ratio)), -weight * advantage
    return clipped(ratio, advantage, bounds)


def sequence_ratio(i: int) -> float:
    members = next(m for m in MEMBERS if i in m)
    return math.prod(RATIO[j] for j in members) ** (1 / len(members))


def reference_weight(aggregation: str, i: int) -> float:
    if aggregation == "sequence_mean":
        return 1 / 3 / LENGTH[i]
    if aggregation == "token_mean":
        return 1 / 6
    if aggregation == "budget":
        return 1 / 8
    return 1 / 3 / 10


def reference_correction(correction: str, i: int) -> float:
    if correction == "none":
        return 1.0
    members = next(m for m in MEMBERS if i in m) if correction.endswith("_sequence") else [i]
    weight = math.exp(sum(OLD[j] - ROLLOUT[j] for j in members))
    if correction.startswith("tis"):
        return min(weight, 2.0)
    return weight if weight <= 2.0 or correction == "decoupled" else 0.0


@pytest.mark.parametrize("bounds", [BOUNDS, DUAL, NARROW], ids=["plain", "dual clip", "narrow"])
@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_loss_and_gradient_match_the_reference(
    surrogate: str, aggregation: str, correction: str, bounds: Bounds
) -> None:
    old_C, sequence_C = torch.tensor(OLD, dtype=torch.float64), torch.tensor(SEQUENCE)
    theta_C = (old_C + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    advantage_C = torch.tensor(ADVANTAGE, dtype=torch.float64)
    terms = SURROGATES[surrogate](theta_C, old_C, advantage_C, sequence_C, bounds)
    weight_C = AGGREGATIONS[aggregation](sequence_C, COUNTS)
    weight_C = weight_C * CORRECTIONS[correction](old_C, torch.tensor(ROLLOUT, dtype=torch.float64), sequence_C, bounds)
    loss = (weight_C * terms.loss_C).sum()
    loss.backward()

    factor = [reference_weight(aggregation, i) * reference_correction(correction, i) for i in range(6)]
    expected, slope = 0.0, [0.0] * 6
    for i in range(6):
        if surrogate == "gspo":
            value, derivative = clipped(sequence_ratio(i), ADVANTAGE[i], bounds)
            # each token of the sequence has a share in its ratio
            for j in next(m for m in MEMBERS if i in m):
                slope[j] += factor[i] * derivative / LENGTH[i]
        else:
            value, derivative = reference_token(surrogate, i, bounds)
            slope[i] += factor[i] * derivative
        expected += factor[i] * value
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert theta_C.grad is not None
    torch.testing.assert_close(theta_C.grad, torch.tensor(slope, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    ratio = [sequence_ratio(i) for i in range(6)] if surrogate == "gspo" else RATIO
    torch.testing.assert_close(terms.ratio_C, torch.tensor(ratio, dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_every_bound_is_met_by_a_token_here() -> None:
    assert any(ADVANTAGE[i] < 0 and RATIO[i] > 1.05 for i in range(6)), "dual clip"
    weights = [math.exp(a - b) for a, b in zip(OLD, ROLLOUT, strict=True)]
    assert min(weights) < 1 < 2 < max(weights), "the cap on corrections"
    assert min(map(sequence_ratio, range(6))) < 0.96 and max(map(sequence_ratio, range(6))) > 1.05, "GSPO's clip"


def test_golden_number_of_grpo() -> None:
    # Sequence 0: held 1.3 * 0.8, held 0.8 * -0.4, free 1.5 -> -(1.04 - 0.32 + 1.5) / 3 = -0.74
    # Sequence 1: free 1.1 * -1.1 -> 1.21.  Sequence 2: held 0.8 * -2, held 1.3 * 0.6 -> (1.6 - 0.78) / 2 = 0.41
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = old_C + torch.tensor(RATIO, dtype=torch.float64).log()
    terms = SURROGATES["ppo_clip"](
        theta_C, old_C, torch.tensor(ADVANTAGE, dtype=torch.float64), torch.tensor(SEQUENCE), BOUNDS
    )
    loss = (AGGREGATIONS["sequence_mean"](torch.tensor(SEQUENCE), COUNTS) * terms.loss_C).sum()
    assert loss.item() == pytest.approx((-0.74 + 1.21 + 0.41) / 3, rel=1e-12)
    assert terms.clipped_C.tolist() == [True, True, False, False, True, True]


def test_golden_number_of_dapo() -> None:
    # Held at 1.28 * 0.8 and 1.28 * 0.6, at 0.8 * -0.4 and 0.8 * -2, free 1.5 and 1.1 * -1.1, over six tokens.
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = (old_C + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    bounds = bounds_of(PolicyConfig(algorithm="dapo"))
    terms = SURROGATES["ppo_clip"](
        theta_C, old_C, torch.tensor(ADVANTAGE, dtype=torch.float64), torch.tensor(SEQUENCE), bounds
    )
    loss = (AGGREGATIONS["token_mean"](torch.tensor(SEQUENCE), COUNTS) * terms.loss_C).sum()
    loss.backward()
    assert loss.item() == pytest.approx(-(1.024 - 0.32 + 1.5 - 1.21 - 1.6 + 0.768) / 6, rel=1e-12)
    assert theta_C.grad is not None
    assert theta_C.grad.tolist() == pytest.approx([0, 0, -1.5 / 6, 1.21 / 6, 0, 0], rel=1e-12)


def test_truncated_importance_weights_are_capped() -> None:
    weight_C = CORRECTIONS["tis"](torch.tensor(OLD), torch.tensor(ROLLOUT), torch.tensor(SEQUENCE), BOUNDS)
    assert weight_C[1] == 2.0  # exp(1.1) is above the cap
    assert weight_C.max() == 2.0 and weight_C[2] == 1.0


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_law_6_no_advantage_gives_exactly_no_gradient(surrogate: str) -> None:
    old_C = torch.tensor(OLD, dtype=torch.float64)
    theta_C = (old_C + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    nothing_C = torch.zeros(6, dtype=torch.float64)
    SURROGATES[surrogate](theta_C, old_C, nothing_C, torch.tensor(SEQUENCE), BOUNDS).loss_C.sum().backward()
    assert theta_C.grad is not None and (theta_C.grad == 0).all()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_weights_of_parts_are_those_of_the_whole(aggregation: str) -> None:
    whole = AGGREGATIONS[aggregation](torch.tensor(SEQUENCE), COUNTS)
    parts = [AGGREGATIONS[aggregation](torch.tensor(ids), COUNTS) for ids in ([0, 0, 0], [0, 1, 1])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=0.0)
