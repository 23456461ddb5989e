"""Law 1 with rows that are sampled each in its own way: tokens are those of plain decoding, and of the row alone, and the learner recomputes
their log-probabilities at the row's temperature (law 2)."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from respec.policy.logprobs import token_logprobs
from respec.policy.pack import pack
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.types import PLAIN, Ask, Mode, Plan, Prompt, Rollout, Sample, Sampling, ScoredRollout, Stream
from respec.weights.publish import publish

COMMON = Sampling(max_new_tokens=24, temperature=0.7, stop=("zz",))
OWN = (
    {"temperature": 1.3},
    {"temperature": 0.0, "max_new_tokens": 9},
    {},
    {"min_p": 0.2, "max_new_tokens": 40},
    {"top_p": 0.6},
    {"temperature": 1.3},
)
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def asks(group: int = 3) -> list[Ask]:
    rng = random.Random(5)
    prompts = [
        Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(rng.randint(1, 20))), sampling=own)
        for row, own in enumerate(OWN)
    ]
    return [Ask(prompt, Stream.TRAIN, 0, group, prompt.settings(COMMON)) for prompt in prompts]


def engine(policy, dtype: str, near=None, max_batch: int = 16, mode: Mode = "matching") -> Engine:
    small = near(policy) if near is not None else None
    drafters = [NgramDrafter(1), SuffixDrafter(1, 0.1, 10_000)]
    if small is not None:
        drafters.append(ModelDrafter(publish(small, dtype, 0), small.tokenizer, policy.tokenizer, 48))
    return Engine(publish(policy, dtype, 0), policy.tokenizer, (1,), 7, max_batch, 64, drafters, mode)


def same(one: Rollout, other: Rollout) -> bool:
    fields = ("token_T", "logprob_T", "kept_logmass_T", "entropy_T")
    return one.finish == other.finish and all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_their_own_settings_are_drawn_as_by_plain_decoding_and_as_alone(make_policy, near, dtype: str):
    policy = make_policy(dtype=DTYPES[dtype] if dtype == "float64" else torch.float32)
    plain, _ = engine(policy, dtype).rollout(asks(), COMMON)
    assert [len(r.token_T) for r in plain if r.finish == "length"] and {r.prompt.row for r in plain} == set(range(6))
    assert max(len(r.token_T) for r in plain if r.prompt.row == 1) <= 9, "its own limit"
    assert max(len(r.token_T) for r in plain if r.prompt.row == 3) > 24, "a limit beyond the common one"
    assert all((r.kept_logmass_T < 0).any() == (r.prompt.row in (3, 4)) for r in plain), (
        "cut off by min-p and top-p alone"
    )
    for plan in (Plan("ngram", 4, 1, 4), Plan("suffix", 4, 2, 6), Plan("model", 4, 2, 6)):
        drafted, stats = engine(policy, dtype, near, max_batch=7).rollout(asks(), COMMON, plan)
        assert all(map(same, drafted, plain)), plan
        assert plan.drafter != "model" or stats.accepted > 20
    for ask in asks():
        alone, _ = engine(policy, dtype).rollout([dataclasses.replace(ask, sampling=None)], ask.sampling or COMMON)
        assert all(map(same, alone, [r for r in plain if r.prompt.row == ask.prompt.row]))


def test_rejection_is_greedy_where_the_row_is(make_policy, near):
    policy = make_policy()
    plain, _ = engine(policy, "float32").rollout(asks(), COMMON, PLAIN)
    drafted, _ = engine(policy, "float32", near, mode="rejection").rollout(asks(), COMMON, Plan("model", 4, 1, 4))
    greedy = [(a, b) for a, b in zip(drafted, plain, strict=True) if a.prompt.row == 1]
    assert greedy and all(np.array_equal(a.token_T, b.token_T) for a, b in greedy)


def test_the_learner_recomputes_each_row_at_its_own_temperature(make_policy):
    policy = make_policy(dtype=torch.float64)
    rollouts, _ = engine(policy, "float64").rollout(asks(), COMMON)
    samples = [Sample(ScoredRollout(r, 0.0, {}), np.ones(len(r.token_T), np.float32)) for r in rollouts]
    batches = pack(samples, 200, COMMON.temperature)
    assert {batch.temperature for batch in batches} == {0.0, 0.7, 1.3}
    by_key = {r.key: r for r in rollouts}
    seen = 0
    for batch in batches:
        logprob_C, _ = token_logprobs(policy.model, batch, 64)
        recorded_C = np.concatenate([by_key[key].logprob_T for key in batch.key_S])
        # the engine records in float32
        assert np.abs(logprob_C.detach().numpy() - recorded_C).max() < 2e-6
        seen += len(batch.key_S)
    assert seen == len(rollouts)
