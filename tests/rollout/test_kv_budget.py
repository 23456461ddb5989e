"""A budget of the KV cache: sequences wait for room, tokens are those of a rollout without one, and no byte more is ever held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from respec.errors import CacheError
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache, bytes_of
from respec.types import PLAIN, Ask, Plan, Prompt, Sampling, Stream
from respec.weights.publish import publish

NODES = 64


def held(*caches: KVCache | None) -> int:
    """Bytes of the tensors themselves."""
    return sum(x.nbytes for cache in caches if cache is not None for x in (*cache.keys, *cache.values))


@pytest.fixture(scope="module")
def engines(make_policy, near):
    """An engine by budget and whether a model drafts: its drafter beside it."""
    policy = make_policy("qwen3")
    small = near(policy)

    def make(budget: int | None, drafts: bool) -> tuple[Engine, ModelDrafter | None]:
        drafter = ModelDrafter(publish(small, "float32", 0), small.tokenizer, policy.tokenizer, 48) if drafts else None
        drafters = (drafter,) if drafter is not None else ()
        decoder = publish(policy, "float32", 0)
        return Engine(decoder, policy.tokenizer, (1,), 0, 8, 32, drafters, kv_budget=budget), drafter

    return make, publish(policy, "float32", 0).shape


LOADS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=4), st.integers(1, 24)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=15, deadline=None)
@given(LOADS, st.floats(1.0, 6.0), st.booleans())
def test_no_more_than_the_budget_is_held_and_the_tokens_are_the_same(engines, loads, room: float, drafts: bool):
    """Rollouts one after the other, each of (prompt length, group) pairs and a limit; `room`: the budget in sequences of the longest."""
    make, shape = engines
    longest = max(length + limit for pairs, limit in loads for length, _ in pairs) + (NODES if drafts else 0)
    budget = int(room * bytes_of(shape, longest) * (2 if drafts else 1))
    (bound, drafter), (free, _) = make(budget, drafts), make(None, drafts)
    plan = Plan("model", 3, 1, 3) if drafts else PLAIN
    for draw, (pairs, limit) in enumerate(loads):
        asks = [
            Ask(Prompt(row, "", tuple(3 + (7 * row + i) % 40 for i in range(length))), Stream.TRAIN, draw, group)
            for row, (length, group) in enumerate(pairs)
        ]
        rounds = []

        def look(record, rounds=rounds):
            rounds.append(record)
            assert 0 < held(bound._cache, drafter and drafter._cache) <= budget

        ours, _ = bound.rollout(asks, Sampling(limit), plan, look)
        expected, _ = free.rollout(asks, Sampling(limit), plan)
        assert [r.token_T.tolist() for r in ours] == [r.token_T.tolist() for r in expected]
        assert all(np.array_equal(a.logprob_T, b.logprob_T) for a, b in zip(ours, expected, strict=True))
        assert len(ours) == sum(group for _, group in pairs)


def test_sequences_without_room_wait_and_enter_as_others_finish(engines):
    make, shape = engines
    engine, _ = make(2 * bytes_of(shape, 3 + 16), False)
    rounds = []
    engine.rollout([Ask(Prompt(0, "", (3, 4, 5)), Stream.TRAIN, 0, 7)], Sampling(16), PLAIN, rounds.append)
    assert max(record.active for record in rounds) == 2 and rounds[0].waiting == 5 and rounds[-1].waiting == 0


def test_a_sequence_that_never_fits_is_said_at_once(engines):
    make, shape = engines
    engine, _ = make(bytes_of(shape, 19) - 1, False)
    drawn = []
    with pytest.raises(CacheError, match=r"rollout.kv_cache_mb is .* a single sequence of 19 tokens"):
        engine.rollout([Ask(Prompt(0, "", (3, 4, 5)), Stream.TRAIN, 0, 2)], Sampling(16), PLAIN, drawn.append)
    assert not drawn
