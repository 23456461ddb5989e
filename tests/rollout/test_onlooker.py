"""Guesses made beside decoding are those the drafter would have drafted, are held to what came, take little time, and change no token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.onlooker import ENOUGH, Onlooker
from respec.rollout.planner import StaticPlanner
from respec.rollout.replay import common
from respec.rollout.request import Request
from respec.types import PLAIN, Ask, DraftCounts, Load, Plan, Prompt, RoundRecord, Sampling, Stream
from respec.weights.publish import publish

DEPTH = 4


@dataclass
class Curious:
    """Plain decoding, and all it was told of idle drafters, summed."""

    shadow_depth: int = DEPTH
    predicted: float = 0.0
    plan_: Plan = PLAIN
    told: dict[str, np.ndarray] = field(default_factory=dict)

    def plan(self, load: Load) -> Plan:
        return self.plan_

    def depths(self) -> None:
        return None

    def learn(self, rollouts) -> None:
        pass

    def observe(self, record: RoundRecord) -> None:
        pass

    def shadow(self, drafter: str, counts: DraftCounts) -> None:
        seen = np.array([counts.asked_D, counts.drafted_D, counts.parents_D, counts.tested_D, counts.accepted_D])
        assert seen[0, 0] >= ENOUGH
        self.told[drafter] = self.told.get(drafter, np.zeros_like(seen)) + seen


class Clock:
    """Every reading is a second after the one before."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def texts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3) for _ in range(rng.randrange(5, 40))] for _ in range(count)]


def request(order: int) -> Request:
    return Request(Ask(Prompt(order, "", (1, 2)), Stream.TRAIN, 0, 1), 0, np.zeros(1, np.uint64), order)


def decoded(onlooker: Onlooker, text_B: list[list[int]], busy: str = "off") -> None:
    """A token a round to each request until its text ends."""
    active = [request(order) for order in range(len(text_B))]
    while active:
        for one in active:
            one.tokens.append(text_B[one.order][len(one.tokens)])
        ended = [one for one in active if len(one.tokens) == len(text_B[one.order])]
        active = [one for one in active if one not in ended]
        onlooker.look(active, ended, busy)


def test_guesses_are_held_to_what_came():
    """By hand: a guess every DEPTH tokens from the first round on, and what it has in common with the text."""
    curious, text_B = Curious(), texts(12)
    onlooker = Onlooker({"ngram": NgramDrafter(1)}, curious, share=1e9)
    decoded(onlooker, text_B)
    expected = np.zeros((5, DEPTH), np.int64)
    for order, text in enumerate(text_B):
        for at in range(1, len(text), DEPTH):
            one = request(order)
            one.tokens = text[:at]
            (tree,) = NgramDrafter(1).propose([one], Plan("ngram", DEPTH, 1, DEPTH), [DEPTH], None)
            room = min(DEPTH, len(text) - at)
            draft = tree.token_n[:room]
            stood = common(draft, text[at:])
            for d in range(DEPTH):
                on = d <= stood
                expected[:, d] += [d < room, d < len(draft), on and d < room, on and d < len(draft), d < stood]
    left = onlooker._counts["ngram"]
    assert (curious.told["ngram"] + left == expected).all()
    assert 0 < expected[4, 0] < expected[3, 0] < expected[0, 0]


def test_a_drafter_in_use_is_not_guessed_for():
    curious = Curious()
    decoded(Onlooker({"ngram": NgramDrafter(1)}, curious, share=1e9), texts(12), busy="ngram")
    assert not curious.told


def test_a_planner_that_does_not_want_to_know_costs_nothing():
    for planner in (StaticPlanner(PLAIN), Curious(shadow_depth=0)):
        clock = Clock()
        decoded(Onlooker({"ngram": NgramDrafter(1)}, planner, clock=clock), texts(3))
        assert isinstance(planner, StaticPlanner) or not planner.told


def test_looking_on_keeps_to_its_share():
    """A look takes one tick, and time passes only by looks that were asked for: two ticks where one was taken, one where it was left out."""
    clock = Clock()
    onlooker = Onlooker({"ngram": NgramDrafter(1)}, Curious(), share=0.05, clock=clock)
    for _ in range(40):
        decoded(onlooker, texts(12))
    assert 0.02 * clock.now < onlooker._spent_s <= 0.05 * clock.now + 1.0


def test_no_token_changes(make_policy, monkeypatch):
    """Beside plain decoding, and beside another drafter: the rollouts of an engine that nobody looks on in."""
    # however little time decoding takes here
    monkeypatch.setattr("respec.rollout.session.Onlooker", partial(Onlooker, share=1e9))
    policy, sampling = make_policy("qwen3"), Sampling(max_new_tokens=32, temperature=0.15)
    rng = random.Random(3)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(20))) for row in range(3)]
    asks = [Ask(prompt, Stream.TRAIN, 0, 4) for prompt in prompts]

    def drawn(planner):
        drafters = (NgramDrafter(1), SuffixDrafter(1, 0.1, 10_000))
        engine = Engine(publish(policy, "float32", 0), policy.tokenizer, (1,), 0, 16, drafters=drafters)
        return engine.rollout(asks, sampling, planner)[0]

    plain = drawn(PLAIN)
    for curious in (Curious(), Curious(plan_=Plan("ngram", 4, 1, 4))):
        seen = drawn(curious)
        assert curious.told["suffix"][4, 0] > 0
        for a, b in zip(seen, plain, strict=True):
            assert (a.token_T == b.token_T).all() and (a.logprob_T == b.logprob_T).all()
