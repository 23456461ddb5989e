"""Laws 2, 3 and 4: honest log-probabilities, exact rollback, and nothing stale after a weight swap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.errors import StaleError
from respec.policy.logprobs import token_logprobs
from respec.policy.pack import pack
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.types import Ask, Plan, Prompt, Sample, Sampling, ScoredRollout, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

PLAN = Plan("suffix", 6, 1, 6)


def asks() -> list[Ask]:
    rng = np.random.default_rng(0)
    return [
        Ask(Prompt(row, "", tuple(rng.integers(3, 48, 5 + 7 * row).tolist())), Stream.TRAIN, 0, 4) for row in range(4)
    ]


def engine(policy, dtype: str, max_batch: int = 8) -> Engine:
    return Engine(
        publish(policy, dtype, 0),
        policy.tokenizer,
        policy.eos_token_ids,
        1,
        max_batch,
        drafters=[SuffixDrafter(1, 0.1, 10_000)],
    )


def recomputed(policy, rollouts, temperature: float) -> np.ndarray:
    """The learner's own log-probabilities, in the rollouts' order."""
    flat = []
    for rollout in rollouts:
        sample = Sample(ScoredRollout(rollout, 0.0, {}), np.zeros(len(rollout.token_T), np.float32))
        (batch,) = pack([sample], 10_000, temperature)
        with torch.no_grad():
            flat.append(token_logprobs(policy.model, batch, 512)[0].double().numpy())
    return np.concatenate(flat)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_learner_recomputes_what_the_engine_stamped(make_policy, temperature):
    policy = make_policy(dtype=torch.float64)
    rollouts, _ = engine(policy, "float64").rollout(asks(), Sampling(30, temperature, top_p=0.9), PLAN)
    stamped = np.concatenate([r.logprob_T for r in rollouts]).astype(np.float64)
    # stamps are kept in float32
    assert np.abs(stamped - recomputed(policy, rollouts, temperature)).max() < 2e-6


def test_float64_log_probabilities_agree_to_1e_10(make_policy):
    policy = make_policy(dtype=torch.float64)
    decoder, tokens = publish(policy, "float64", 0), np.arange(3, 40)
    cache = KVCache(decoder.shape, 1, 64)
    hidden = decoder.hidden(tokens, np.zeros(37, np.int64), np.arange(37), cache).hidden
    with torch.no_grad():
        reference = policy.model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    assert (torch.log_softmax(decoder.logits(hidden), -1) - torch.log_softmax(reference, -1)).abs().max() < 1e-10


def test_a_bfloat16_snapshot_stays_near_the_float32_trainer(make_policy):
    policy = make_policy()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1 / 3.0 if parameter.ndim > 1 else 1.0)
    rollouts, _ = engine(policy, "bfloat16").rollout(asks(), Sampling(30), PLAN)
    stamped = np.concatenate([r.logprob_T for r in rollouts])
    assert np.abs(stamped - recomputed(policy, rollouts, 1.0)).mean() <= 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_equals_decoding_and_rollback_leaves_no_trace(make_policy, dtype):
    decoder = publish(make_policy(), dtype, 0)
    tokens = np.random.default_rng(1).integers(3, 48, 30)
    slots = np.zeros(30, np.int64)
    whole, stepwise, drafted = (KVCache(decoder.shape, 1, 64) for _ in range(3))
    at_once = decoder.logits(decoder.hidden(tokens, slots, np.arange(30), whole).hidden)
    for i in range(30):
        one = decoder.logits(decoder.hidden(tokens[i : i + 1], slots[:1], np.array([i]), stepwise).hidden)
        assert torch.equal(one[0], at_once[i])
        # a draft of five wrong tokens beside the right one; the next pass overwrites what it wrote
        wrong = np.r_[tokens[i], (tokens[i] + np.arange(1, 6)) % 45 + 3]
        together = decoder.logits(decoder.hidden(wrong, np.zeros(6, np.int64), np.arange(i, i + 6), drafted).hidden)
        assert torch.equal(together[0], at_once[i])
    for cache in (stepwise, drafted):
        for ours, theirs in zip(cache.entries(0, 30), whole.entries(0, 30), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_after_a_swap_nothing_computed_by_the_old_weights_is_read(make_policy, dtype):
    """Swapped in the middle of sequences: each token's log-probability is that of the version it is stamped with."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    old, new = make_policy(dtype=kind, seed=0), make_policy(dtype=kind, seed=5)
    running = engine(old, dtype)

    def on_round(record) -> None:
        if running.version == 0 and record.emitted and record.active == 8:
            on_round.seen += 1
            if on_round.seen == 4:
                swap(running, new, dtype, 1)

    on_round.seen = 0
    rollouts, _ = running.rollout(asks(), Sampling(30, 1.0), PLAN, on_round)
    both = [r for r in rollouts if len(set(r.version_T.tolist())) == 2]
    assert both, "the swap must fall inside sequences"
    stamped = np.concatenate([r.logprob_T for r in rollouts])
    version = np.concatenate([r.version_T for r in rollouts])
    truth = np.where(version == 0, recomputed(old, rollouts, 1.0), recomputed(new, rollouts, 1.0))
    gap = np.abs(stamped - truth)
    assert gap.max() < 1e-5 if dtype == "float64" else gap.mean() < 0.1


def test_the_door_takes_newer_versions_only(make_policy):
    running = engine(make_policy(), "float32")
    swap(running, make_policy(seed=2), "float32", 3)
    with pytest.raises(StaleError, match="version 3; version 3 is not newer"):
        swap(running, make_policy(seed=2), "float32", 3)


def test_a_cache_refuses_keys_of_another_version_and_leaks(make_policy):
    cache = KVCache(publish(make_policy(), "float32", 0).shape, 2, 32)
    one, two = cache.allocate(0), cache.allocate(1)
    with pytest.raises(StaleError, match="policy version"):
        cache.fork(one, two, 0)
    with pytest.raises(StaleError, match="the policy is at 1"):
        cache.check_integrity(1)
    cache.release(one)
    cache.check_integrity(1)
