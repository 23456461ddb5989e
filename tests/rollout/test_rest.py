"""An engine at rest has let its weights and large caches go, refuses to decode, and draws after a swap what it would have drawn."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from respec.errors import StaleError
from respec.rollout import engine as engine_room
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.types import Ask, Plan, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

PLAN, SAMPLING = Plan("suffix", 4, 1, 4), Sampling(12, 0.7)


def drawn(engine: Engine, draw: int) -> tuple[Rollout, ...]:
    asks = [Ask(Prompt(row, "", (3 + row, 9, 4)), Stream.TRAIN, draw, 2) for row in range(2)]
    rollouts, _ = engine.rollout(asks, SAMPLING, PLAN)
    for drafter in engine.drafters.values():
        drafter.learn(rollouts)
    return rollouts


def made(policy) -> Engine:
    return Engine(
        publish(policy, "float32", 0),
        policy.tokenizer,
        policy.eos_token_ids,
        1,
        4,
        drafters=[SuffixDrafter(1, 0.1, 999)],
    )


@pytest.mark.parametrize("large", [0, 2**40])
def test_it_draws_after_a_swap_what_it_would_have_drawn(make_policy, monkeypatch, large: int) -> None:
    monkeypatch.setattr(engine_room, "LARGE_CACHE", large)
    policy = make_policy()
    steady, rested = made(policy), made(policy)
    for version in (1, 2):
        one, other = drawn(steady, version), drawn(rested, version)
        assert all(np.array_equal(a.token_T, b.token_T) for a, b in zip(one, other, strict=True))
        weights, cache = weakref.ref(rested.decoder), weakref.ref(rested._cache)
        rested.rest()
        assert weights() is None and (cache() is None) == (large == 0)
        assert rested.version == version - 1 and rested.decoder.shape == steady.decoder.shape
        with pytest.raises(StaleError, match="needs a swap"):
            drawn(rested, version)
        for engine in (steady, rested):
            swap(engine, policy, "float32", version)
    assert drawn(rested, 3)[0].version_T.tolist() == drawn(steady, 3)[0].version_T.tolist()
