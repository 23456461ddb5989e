"""The learning-rate schedule, point by point."""

from __future__ import annotations

import pytest
import torch

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
