"""The model drafters: what they propose depends on the tokens alone, however they came by them, and on weights that are not stale."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from respec.errors import ModelError, StaleError
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.draft.protocol import DraftContext, PolicyDrafter
from respec.rollout.draft.self_quant import SelfQuantDrafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.types import Ask, Mode, Plan, Prompt, Proposer, Sampling, Stream
from respec.weights.publish import publish, publish_draft
from respec.weights.swap import swap

PLAN = Plan("model", 4, 2, 7)
SAMPLING = Sampling(60, 0.7)


def request(row: int, prompt: int = 5, slot: int = 0) -> Request:
    tokens = tuple(np.random.default_rng(row).integers(3, 48, prompt).tolist())
    return Request(Ask(Prompt(row, "", tokens), Stream.TRAIN, 0, 1), 0, sequence_key(0, 0, 0, row, 0), row, slot)


def grown(asked: Request, count: int) -> Request:
    asked.tokens += np.random.default_rng(len(asked.tokens)).integers(3, 48, count).tolist()
    return asked


def drafter(policy, dtype: str = "float32", vocabulary: int = 48, chunk: int = 256) -> ModelDrafter:
    return ModelDrafter(publish(policy, dtype, 0), policy.tokenizer, policy.tokenizer, vocabulary, chunk)


@pytest.fixture
def context(make_policy) -> DraftContext:
    return DraftContext(SAMPLING, "matching", KVCache(publish(make_policy(), "float32", 0).shape, 2, 128))


def same(one, other) -> bool:
    laws = [{**tree.law} for tree in (one, other)]
    return (
        one.token_n == other.token_n
        and one.parent_n == other.parent_n
        and laws[0].keys() == laws[1].keys()
        and all(np.array_equal(laws[0][node], laws[1][node]) for node in laws[0])
    )


@pytest.mark.parametrize("mode", ["matching", "rejection"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_may_start_late_be_dropped_and_go_on_from_rejected_drafts(make_policy, context, mode: Mode, dtype):
    context = dataclasses.replace(context, mode=mode)
    policy = make_policy("llama", seed=4)
    steady, dropped = drafter(policy, dtype), drafter(policy, dtype, chunk=3)
    asked, other = request(0), request(1, 17, 1)
    for step, count in enumerate((1, 3, 1, 2, 9, 1)):
        grown(asked, count)
        expected = steady.propose([asked, grown(other, 1)], PLAN, [9, 9], context)
        # all drafts above were right up to nowhere, this one's beginning is what comes to pass
        if step == 2:
            asked.tokens += expected[0].token_n[:2]
            expected = steady.propose([asked, other], PLAN, [9, 9], context)
        late = drafter(policy, dtype).propose([other, asked], PLAN, [9, 9], context)
        dropped.drop()
        again = dropped.propose([asked, other], PLAN, [9, 9], context)
        assert expected[0].proposer == Proposer.MODEL and len(expected[0].token_n) == PLAN.n
        for tree, one, two in zip(expected, reversed(late), again, strict=True):
            assert same(tree, one) and same(tree, two)


def test_it_reads_no_token_twice(make_policy, context, monkeypatch):
    """After k of 4 drafted tokens and one of the target's own: that one, and the fourth, which was drawn but never read."""
    one, plan, asked = drafter(make_policy()), Plan("model", 4, 1, 4), request(0)
    read, hidden = list[list[int]](), one._decoder.hidden
    monkeypatch.setattr(
        one._decoder, "hidden", lambda token_M, *rest: read.append(token_M.tolist()) or hidden(token_M, *rest)
    )
    (tree,) = one.propose([asked], plan, [9], context)
    for accepted in (4, 2, 4, 0, 0, 3):
        wrong = next(token for token in range(3, 48) if token not in tree.token_n)
        asked.tokens += [*tree.token_n[:accepted], wrong]
        read.clear()
        (tree,) = one.propose([asked], plan, [9], context)
        assert read[0] == asked.tokens[-2 if accepted == 4 else -1 :]


def test_finished_requests_give_their_places_back(make_policy, context):
    one = drafter(make_policy())
    for row in range(5):
        asked = [request(row), request(row + 10)]
        one.propose(asked, PLAN, [9, 0], context)
        for gone in asked:
            one.finish(gone)
    one.propose([request(0), request(1)], PLAN, [9, 9], context)
    one.drop()
    one.propose([request(0), request(1)], PLAN, [9, 9], context)
    assert len(one._places) == 2


@pytest.mark.parametrize("vocabulary", [40, 48, 64])
@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_logits_are_as_wide_as_the_targets(make_policy, context, vocabulary, mode: Mode):
    context = dataclasses.replace(context, mode=mode)
    (tree,) = drafter(make_policy(), vocabulary=vocabulary).propose([request(0)], PLAN, [9], context)
    assert max(tree.token_n) < min(vocabulary, 48)
    assert all(len(law) == vocabulary and abs(law.sum() - 1) < 1e-12 for law in tree.law.values())


def test_another_vocabulary_is_refused(make_policy):
    policy = make_policy()
    words = {**policy.tokenizer.get_vocab(), "Z": 48}
    another = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")))
    with pytest.raises(ModelError, match=r"1 tokens differ \(first: 'Z'\), of 49 and 48"):
        ModelDrafter(publish(policy, "float32", 0), another, policy.tokenizer, 48)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_a_quantized_draft_leaves_the_keys_that_are_read_alone(make_policy, monkeypatch, native):
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    policy = make_policy()
    target, cache = publish(policy, "bfloat16", 0), KVCache(publish(policy, "bfloat16", 0).shape, 2, 64)
    for tensor in (*cache.keys, *cache.values):
        torch.nn.init.normal_(tensor)
    asked = [request(0, 15, 0), request(1, 18, 1)]
    for one in asked:
        tokens = np.array(one.ask.prompt.token_ids[:-1])
        target.hidden(tokens, np.full(len(tokens), one.slot), np.arange(len(tokens)), cache)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    entries = [cache.entries(one.slot, one.length - 1) for one in asked]
    held = [[layer.clone() for part in entry for layer in part] for entry in entries]
    one = SelfQuantDrafter(publish_draft(policy, "bfloat16", 0))
    trees = one.propose(asked, PLAN, [9, 9], DraftContext(SAMPLING, "matching", cache))
    assert all(len(tree.token_n) == PLAN.n and tree.proposer == Proposer.SELF_QUANT for tree in trees)
    assert not all(torch.equal(a, b) for a, b in zip(before, (*cache.keys, *cache.values), strict=True))
    for asked_one, old in zip(asked, held, strict=True):
        entry = cache.entries(asked_one.slot, asked_one.length - 1)
        assert all(torch.equal(a, b) for a, b in zip(old, (layer for part in entry for layer in part), strict=True))


def test_the_door_renews_the_quantized_self_and_refuses_to_leave_it_behind(make_policy):
    old, new = make_policy(), make_policy(seed=5)
    drafting = SelfQuantDrafter(publish_draft(old, "float32", 0))
    assert isinstance(drafting, PolicyDrafter)
    engine = Engine(publish(old, "float32", 0), old.tokenizer, (1,), 0, 4, drafters=[drafting])
    with pytest.raises(
        StaleError, match="'self_quant' decodes with the policy's weights and was given none of version 1"
    ):
        engine.swap(publish(new, "float32", 1))
    swap(engine, new, "float32", 1)
    assert drafting._decoder.version == 1
    rollouts, stats = engine.rollout(
        [Ask(request(0).ask.prompt, Stream.TRAIN, 0, 8)], Sampling(30, 0.3), Plan("self_quant", 4, 1, 4)
    )
    # drafts by the weights that verify are mostly right, drafts by others would not be
    assert stats.accepted > 0.6 * stats.drafted and len(rollouts) == 8
