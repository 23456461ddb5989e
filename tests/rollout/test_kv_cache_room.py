"""A key is never written past a slot's end: native kernels would put it into whatever lies there."""

from __future__ import annotations

import numpy as np
import pytest

from respec.errors import CacheError
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.types import PLAIN, Ask, Prompt, Sampling, Stream
from respec.weights.publish import publish


def test_the_last_index_fits_and_the_next_does_not(make_policy):
    decoder = publish(make_policy("qwen3"), "float32", 0)
    cache = KVCache(decoder.shape, 1, 10)
    cache.hold(np.arange(cache.capacity))
    cache.hold(np.zeros(0, np.int64))
    with pytest.raises(CacheError, match=f"index {cache.capacity} of slots that hold {cache.capacity}"):
        cache.hold(np.arange(cache.capacity + 1))


def test_a_cache_that_is_too_small_is_said_and_not_written_past(make_policy, monkeypatch):
    policy = make_policy("qwen3")
    engine = Engine(publish(policy, "float32", 0), policy.tokenizer, (), 0, 2)
    small = KVCache(publish(policy, "float32", 0).shape, 2, 16)
    monkeypatch.setattr(Engine, "_cache_for", lambda *_: small)
    with pytest.raises(CacheError, match="this is a fault of the engine"):
        engine.rollout([Ask(Prompt(0, "", (3, 4, 5)), Stream.TRAIN, 0, 2)], Sampling(max_new_tokens=40), PLAIN)
