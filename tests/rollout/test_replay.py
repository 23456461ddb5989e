"""Replaying what has been drawn counts what decoding with the drafter counts, leaves the drafter as it was, and stops when told."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.replay import replay
from respec.types import Ask, Plan, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish

SAMPLING = Sampling(max_new_tokens=32, temperature=0.15)
DEPTH = 5
MAKERS = {
    "ngram": lambda: NgramDrafter(1),
    "suffix": lambda: SuffixDrafter(1, 0.1, 10_000),
    "previous": lambda: PreviousDrafter(SuffixDrafter(1, 0.1, 10_000), 10_000),
}


def never() -> bool:
    return False


def asks(draw: int) -> list[Ask]:
    rng = random.Random(3)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(20))) for row in range(3)]
    return [Ask(prompt, Stream.TRAIN, draw, 4) for prompt in prompts]


def in_groups(rollouts: tuple[Rollout, ...]) -> list[list[Rollout]]:
    return [list(group) for _, group in itertools.groupby(rollouts, key=lambda rollout: rollout.key[:2])]


def summed(values: list[tuple[int, ...]]) -> list[int]:
    return np.sum([np.pad(row, (0, DEPTH - len(row))) for row in values], axis=0).tolist()


@pytest.mark.parametrize("name", MAKERS)
def test_the_counts_are_those_of_decoding_with_it(make_policy, name):
    """All completions run to the length limit, so that no draft goes on past an end."""
    policy, history = make_policy("qwen3"), MAKERS[name]()
    engine = Engine(publish(policy, "float32", 0), policy.tokenizer, (), 0, 16, drafters=(history,))
    history.learn(engine.rollout(asks(0), SAMPLING)[0])
    drawn, stats = engine.rollout(asks(1), SAMPLING, Plan(name, DEPTH, 1, DEPTH))
    seen = replay(history, in_groups(drawn), DEPTH, never)
    assert seen.drafted_D == tuple(summed([record.drafted_D for record in stats.round_R]))
    assert seen.tested_D == tuple(summed([record.tested_D for record in stats.round_R]))
    assert seen.accepted_D == tuple(summed([record.accepted_D for record in stats.round_R]))
    assert seen.accepted_D[1] > 5 and seen.accepted_D[0] < seen.tested_D[0]
    # each asked at least as often as it drafted, and once a round at the shallowest but for the last place
    assert all(a >= d >= t for a, d, t in zip(seen.asked_D, seen.drafted_D, seen.tested_D, strict=True))
    assert stats.sequence_rounds - 12 <= seen.asked_D[0] <= stats.sequence_rounds
    assert all(a >= p >= t for a, p, t in zip(seen.asked_D, seen.parents_D, seen.tested_D, strict=True))
    # and it is as if nothing had been replayed
    assert replay(history, in_groups(drawn), DEPTH, never) == seen
    again, repeated = engine.rollout(asks(1), SAMPLING, Plan(name, DEPTH, 1, DEPTH))
    assert (repeated.drafted, repeated.accepted) == (stats.drafted, stats.accepted)
    assert all((one.token_T == two.token_T).all() for one, two in zip(again, drawn, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_it_stops_when_told_and_leaves_nothing_in_play(make_rollout, name):
    history = MAKERS[name]()
    group = [make_rollout(0, [5, 6, 7] * 10, sample=i) for i in range(2)]
    asked = iter([False, False, False, True])
    seen = replay(history, [group], DEPTH, lambda: next(asked))
    assert seen.asked_D[0] == 6
    assert replay(history, [group], DEPTH, lambda: True).asked_D == (0,) * DEPTH
    whole = replay(history, [group], DEPTH, never)
    assert whole == replay(MAKERS[name](), [group], DEPTH, never)
    # an ended text's last token may be a drafted one
    assert whole.accepted_D[0] > 4
