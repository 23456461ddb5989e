"""The alarm that tokens are not the policy's own draws: silent for those that are, loud for a verifier that keeps drafts too readily."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from respec.report.surprise import ALARM, LEAST, Surprise, recorded, surprise
from respec.types import Prompt, Rollout, Sampling, Stream


def drawn(rng: np.random.Generator, tokens: int, bias: float) -> Rollout:
    """Tokens of a law that changes from place to place, `bias` of whose mass has been moved to its most probable token."""
    p = rng.dirichlet(np.full(12, 0.4), size=tokens).clip(1e-12)
    p /= p.sum(axis=1, keepdims=True)
    q = (1 - bias) * p
    q[np.arange(tokens), p.argmax(axis=1)] += bias
    token = (rng.random((tokens, 1)) > q.cumsum(axis=1)).sum(axis=1).clip(max=11)
    logp = np.log(p)
    zero = np.zeros(tokens)
    return Rollout(
        Prompt(0, "", (1,)), Stream.TRAIN, 0, 0, token.astype(np.int32), logp[np.arange(tokens), token].astype(np.float32),
        zero.astype(np.float32), -(p * logp).sum(axis=1).astype(np.float32), zero.astype(np.int32), zero.astype(np.uint8),
        zero.astype(np.int32), "", "eos",
    )  # fmt: skip


def test_own_draws_raise_no_alarm_and_biased_ones_do():
    """100 runs of 20,000 tokens are silent: at 6 standard errors chance alone takes 1e-9 a look. A moved mass of 0.1 is seen in each of 20
    runs: it shifts the mean by about 0.07 nats, 11 standard errors, so that the power is above 0.999."""
    rng = np.random.default_rng(0)
    zs = [surprise([drawn(rng, 20_000, 0.0)], Sampling(1)).z for _ in range(100)]
    assert max(map(abs, zs)) < ALARM and abs(np.mean(zs)) < norm.isf(1e-4) / 10 and 0.7 < np.std(zs) < 1.3
    found = [surprise([drawn(rng, 20_000, 0.1)], Sampling(1)) for _ in range(20)]
    assert all(one.alarming and one.mean < 0 for one in found) and np.mean([abs(one.z) for one in found]) > ALARM + 4, (
        "margin for the power"
    )


def test_steps_add_up_to_the_whole():
    rng = np.random.default_rng(1)
    parts = [drawn(rng, n, 0.2) for n in (500, 4_000, 900)]
    whole = surprise(parts, Sampling(1))
    steps = [surprise([part], Sampling(1)) for part in parts]
    added = sum(
        (
            recorded({"rollout/tokens": s.tokens, "rollout/surprise": s.mean, "rollout/surprise_square": s.square / s.tokens})
            for s in steps
        ),
        Surprise(),
    )  # fmt: skip
    assert added.z == pytest.approx(whole.z) and added.tokens == whole.tokens == 5_400
    assert "standard errors of 5400 tokens" in whole.news(steps[0])[0] and whole.news(whole) == []
    assert not replace(whole, tokens=LEAST - 1).alarming, "too few to judge"


@pytest.mark.parametrize(
    "sampling", [Sampling(1, 0.0), Sampling(1, top_k=4), Sampling(1, top_p=0.9), Sampling(1, min_p=0.1)]
)
def test_nothing_is_said_where_the_entropy_is_of_another_law(sampling: Sampling):
    assert surprise([drawn(np.random.default_rng(2), 6_000, 0.2)], sampling) == Surprise()
    assert recorded({"rollout/tokens": 5.0}) == Surprise()
