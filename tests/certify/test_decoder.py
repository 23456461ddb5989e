"""Check b: a decoder that keeps the rules passes; one that breaks any of them fails there, and only there."""

from __future__ import annotations

import dataclasses

import pytest

from respec.certify.decoder import decoder_checks
from respec.rollout.kv_cache import KVCache
from respec.weights.publish import publish

CHECKS = ("batch invariance", "prefill = decode", "rollback")
TEXTS = ([5, 6, 7, 8, 9, 10, 11], [20, 21], [30], list(range(3, 40)))


class Wrapped:
    """A decoder with something done to what goes in or comes out."""

    def __init__(self, inner) -> None:
        self.inner, self.shape, self.version = inner, inner.shape, inner.version

    def hidden(self, token_M, slot_M, position_M, cache, branches=None, taps=()):
        return self.inner.hidden(token_M, slot_M, position_M, cache, branches, taps)

    def logits(self, hidden):
        return self.inner.logits(hidden)


class BatchBound(Wrapped):
    """Sums in another order from nine sequences on."""

    def hidden(self, token_M, slot_M, position_M, cache, branches=None, taps=()):
        done = super().hidden(token_M, slot_M, position_M, cache, branches, taps)
        return dataclasses.replace(done, hidden=done.hidden * 1.01) if len(set(slot_M.tolist())) > 8 else done


class OtherPrefill(Wrapped):
    """Reads several tokens of one sequence by another kernel than single ones."""

    def hidden(self, token_M, slot_M, position_M, cache, branches=None, taps=()):
        done = super().hidden(token_M, slot_M, position_M, cache, branches, taps)
        single = len(token_M) == 1 or len(set(slot_M.tolist())) > 1
        return done if single else dataclasses.replace(done, hidden=done.hidden * 1.01)


class ChainsForTrees(Wrapped):
    """Takes no notice of branches."""

    def hidden(self, token_M, slot_M, position_M, cache, branches=None, taps=()):
        return super().hidden(token_M, slot_M, position_M, cache, None, taps)


class Immovable(KVCache):
    """Leaves accepted keys where they were drafted."""

    def move(self, slot_N, source_N, target_N) -> None:
        pass


def outcomes(decoder, cache=KVCache) -> dict[str, str]:
    found = decoder_checks(decoder, lambda slots, capacity: cache(decoder.shape, slots, capacity), TEXTS)
    assert all((finding.figures.get("max_difference", 0) or 0) > 0 for finding in found if finding.outcome == "failed")
    return {finding.check: finding.outcome for finding in found}


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_decoder_passes(policy, monkeypatch, dtype, native):
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    assert outcomes(publish(policy, dtype, 0)) == dict.fromkeys(CHECKS, "passed")


@pytest.mark.parametrize("wrong, fails", [
    (BatchBound, {"batch invariance"}), (OtherPrefill, {"prefill = decode"}), (ChainsForTrees, {"rollback"}),
])  # fmt: skip
def test_a_wrong_decoder_fails(policy, wrong, fails):
    found = outcomes(wrong(publish(policy, "float32", 0)))
    assert {check for check, outcome in found.items() if outcome == "failed"} == fails


def test_a_cache_that_does_not_close_ranks_fails(policy):
    found = outcomes(publish(policy, "float32", 0), Immovable)
    assert found == {**dict.fromkeys(CHECKS, "passed"), "rollback": "failed"}
