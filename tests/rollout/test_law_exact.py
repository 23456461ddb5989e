"""Law 1 (`matching`): with the same seeds, tokens and log-probabilities with speculation on equal those with it off."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.types import PLAIN, Ask, Plan, Prompt, Proposer, Sampling, Stream
from respec.weights.publish import publish

SAMPLING = Sampling(max_new_tokens=40, temperature=0.7)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def prompts(n: int = 6, seed: int = 3) -> list[Prompt]:
    rng = random.Random(seed)
    return [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(rng.randint(1, 40)))) for row in range(n)]


def asks(n: int = 6, group: int = 4, draw: int = 0) -> list[Ask]:
    return [Ask(prompt, Stream.TRAIN, draw, group) for prompt in prompts(n)]


def drafter(name: str):
    return NgramDrafter(1) if name == "ngram" else SuffixDrafter(1, 0.1, 10_000)


def engine(policy, dtype: str, max_batch: int = 16, name: str = "", chunk: int = 64) -> Engine:
    return Engine(
        publish(policy, dtype, 0),
        policy.tokenizer,
        policy.eos_token_ids,
        7,
        max_batch,
        chunk,
        [drafter(name)] if name else (),
    )


def drafter_of(running: Engine):
    return next(iter(running.drafters.values()))


def equal(one, other, dtype: str) -> bool:
    if [r.key for r in one] != [r.key for r in other]:
        return False
    same = all(
        np.array_equal(a.token_T, b.token_T) and a.text == b.text and a.finish == b.finish
        for a, b in zip(one, other, strict=True)
    )
    gap = max(float(np.abs(a.logprob_T - b.logprob_T).max()) for a, b in zip(one, other, strict=True)) if same else 1.0
    return same and gap <= (1e-6 if dtype == "float64" else 0.0)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_drafter_gives_the_tokens_and_bits_of_plain_decoding(make_policy, monkeypatch, family, dtype, native):
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    policy = make_policy(family, torch.float64 if dtype == "float64" else torch.float32)
    plain, _ = engine(policy, dtype).rollout(asks(), SAMPLING)
    for name in ("ngram", "suffix"):
        for depth in (1, 7):
            drafted, stats = engine(policy, dtype, name=name).rollout(asks(), SAMPLING, Plan(name, depth, 1, depth))
            assert equal(plain, drafted, dtype), (name, depth)
            # the law says nothing unless drafts are both accepted and rejected
            assert 0 < stats.accepted < stats.drafted
    branching, stats = engine(policy, dtype, name="suffix").rollout(asks(), SAMPLING, Plan("suffix", 5, 3, 12))
    assert equal(plain, branching, dtype)
    assert any(record.drafted > sum(record.drafted_D) for record in stats.round_R), "no draft has branched"


@pytest.mark.parametrize("max_batch", [1, 3, 24])
def test_the_batch_does_not_matter(make_policy, max_batch):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    other, _ = engine(policy, "bfloat16", max_batch, "suffix", chunk=8).rollout(
        asks(), SAMPLING, Plan("suffix", 5, 1, 5)
    )
    assert equal(plain, other, "bfloat16")


def test_the_order_of_arrival_and_who_else_is_asked_do_not_matter(make_policy):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    shuffled = asks()
    random.Random(1).shuffle(shuffled)
    other, _ = engine(policy, "bfloat16", 5, "suffix").rollout(shuffled, SAMPLING, Plan("suffix", 4, 1, 4))
    assert equal(plain, other, "bfloat16")
    alone, _ = engine(policy, "bfloat16").rollout(asks()[2:3], SAMPLING)
    assert equal([r for r in plain if r.prompt.row == 2], alone, "bfloat16")


def test_histories_and_plans_change_speed_only(make_policy):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    one = engine(policy, "bfloat16", name="suffix")
    first, before = one.rollout(asks(), SAMPLING, Plan("suffix", 6, 1, 6))
    drafter_of(one).learn(first)
    second, after = one.rollout(asks(), SAMPLING, Plan("suffix", 6, 1, 6))
    third, _ = one.rollout(asks(), SAMPLING, PLAIN)
    assert equal(plain, first, "") and equal(plain, second, "") and equal(plain, third, "")
    # the same completions a second time are what the histories hold: drafts get longer
    assert after.accepted_length > before.accepted_length


def test_a_new_draw_is_fresh_and_streams_differ(make_policy):
    policy = make_policy()
    one, _ = engine(policy, "float32").rollout(asks(draw=0), SAMPLING)
    two, _ = engine(policy, "float32").rollout(asks(draw=1), SAMPLING)
    other, _ = engine(policy, "float32").rollout([dataclasses.replace(a, stream=Stream.EVAL) for a in asks()], SAMPLING)
    assert any(not np.array_equal(a.token_T, b.token_T) for a, b in zip(one, two, strict=True))
    assert any(not np.array_equal(a.token_T, b.token_T) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("sampling", [
    Sampling(30, 0.7, stop=("ab", "Q")), Sampling(30, 0.9, top_k=4), Sampling(30, 0.9, top_p=0.8), Sampling(30, 1.0, min_p=0.1),
    Sampling(30, 0.0), Sampling(1, 0.7), Sampling(30, 0.7, stop_token_ids=(9, 17, 30)),
], ids=str)  # fmt: skip
def test_stops_limits_and_truncation_cut_where_plain_decoding_does(make_policy, sampling):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), sampling)
    drafted, _ = engine(policy, "bfloat16", name="suffix").rollout(asks(), sampling, Plan("suffix", 8, 1, 8))
    assert equal(plain, drafted, "bfloat16")
    for rollout in plain:
        ended = rollout.finish
        assert (len(rollout.token_T) == sampling.max_new_tokens) or ended in ("eos", "stop")
        assert all(stop not in rollout.text for stop in sampling.stop if ended == "stop")
        assert 1 not in rollout.token_T[:-1]


def test_a_stop_string_over_a_drafts_edge_ends_there(make_policy):
    """Stop strings come from what plain decoding wrote, and the histories hold all of it: drafts run over every one of them."""
    policy = make_policy()
    free, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    stop = tuple({r.text[9:11] for r in free if len(r.text) > 12})
    sampling = dataclasses.replace(SAMPLING, stop=stop)
    plain, _ = engine(policy, "bfloat16").rollout(asks(), sampling)
    informed = engine(policy, "bfloat16", name="suffix")
    drafter_of(informed).learn(free)
    drafted, stats = informed.rollout(asks(), sampling, Plan("suffix", 8, 1, 8))
    assert equal(plain, drafted, "bfloat16") and stats.accepted > 0
    assert any(r.finish == "stop" for r in plain)


def test_proposers_tell_who_put_each_token_forward(make_policy):
    drafted, stats = engine(make_policy(), "float32", name="ngram").rollout(asks(), SAMPLING, Plan("ngram", 4, 1, 4))
    counted = sum(int((r.proposer_T == Proposer.NGRAM).sum()) for r in drafted)
    assert counted == stats.accepted > 0
    assert sum(len(r.token_T) for r in drafted) == stats.tokens == sum(record.emitted for record in stats.round_R)
