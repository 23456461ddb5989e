"""The previous drafter drafts a slot's own old answer while it holds, then hands over, and forgets within its budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.lenient import record
from respec.rollout.request import Request
from respec.types import Ask, Mode, Plan, Prompt, Proposer, Rollout, Sampling, Stream

NO_CACHE: Any = None  # neither drafter reads it
PLAN = Plan("previous", 4, 1, 4)


def context(mode: Mode = "matching") -> DraftContext:
    return DraftContext(Sampling(99), mode, NO_CACHE)


def drafter(budget: int = 1000) -> PreviousDrafter:
    return PreviousDrafter(SuffixDrafter(1, 0.1, 1000), budget)


def request(
    row: int,
    sample: int,
    tokens: list[int],
    proposer: Proposer = Proposer.PREVIOUS,
    stream: Stream = Stream.TRAIN,
) -> Request:
    asked = Ask(Prompt(row, "", (3,)), stream, 1, 2)
    proposers = [int(proposer)] * len(tokens)
    return Request(asked, sample, np.zeros(1, np.uint64), 0, tokens=list(tokens), proposers=proposers)


def with_laws(rollout: Rollout) -> Rollout:
    """The rollout as mode lossy records it, every law flat."""
    flat = np.full((len(rollout.token_T), 48), 1 / 48)
    return dataclasses.replace(rollout, law_TK=record(flat, rollout.token_T, 8))


def test_the_old_answer_is_drafted_while_the_completion_equals_it(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20), sample=0), make_rollout(0, range(30, 40), sample=1)])
    asked = [request(0, 0, []), request(0, 1, [30, 31]), request(0, 0, list(range(10, 18)))]
    trees = one.propose(asked, PLAN, [9, 9, 9], context())
    assert [tree.token_n for tree in trees] == [(10, 11, 12, 13), (32, 33, 34, 35), (18, 19)]
    assert all(tree.proposer == Proposer.PREVIOUS and not tree.law for tree in trees)
    assert one.propose(asked[:1], PLAN, [2], context())[0].token_n == (10, 11)
    assert one.propose(asked[:1], PLAN, [0], context())[0].token_n == ()


def test_after_the_first_difference_the_suffix_drafter_goes_on_for_good(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20))])
    asked = request(0, 0, [10, 11])
    assert one.propose([asked], PLAN, [9], context())[0].proposer == Proposer.PREVIOUS
    asked.tokens += [9, 13]
    (tree,) = one.propose([asked], PLAN, [9], context())
    assert tree.proposer == Proposer.SUFFIX and tree.token_n[0] == 14
    # a stranger has no old answer, a slot past its old answer's end no rest of one
    for other in (request(0, 1, [10]), request(0, 0, list(range(10, 20)))):
        assert one.propose([other], PLAN, [9], context())[0].proposer == Proposer.SUFFIX


def test_the_last_answer_counts_and_a_dropped_drafter_finds_its_place_from_the_tokens(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20)), make_rollout(0, range(20, 30), draw=1)])
    asked = request(0, 0, [20])
    one.propose([asked], PLAN, [9], context())
    one.drop()
    asked.tokens += [21, 22]
    assert one.propose([asked], PLAN, [9], context())[0].token_n == (23, 24, 25, 26)


def test_answers_stay_within_the_budget_and_the_oldest_row_leaves_first(make_rollout):
    one = drafter(10)
    one.learn([make_rollout(row, range(4), sample=sample) for row in (0, 1) for sample in (0, 1)])
    assert list(one._answers) == [1] and one._held == 8
    one.learn([make_rollout(1, range(2), sample=0)])
    assert one._held == 6
    one.learn([make_rollout(2, range(4))])
    assert list(one._answers) == [1, 2] and one._held == 10


@pytest.mark.parametrize("tokens", [[], [10, 11], [10, 5]])
def test_a_finished_request_leaves_nothing_behind(make_rollout, tokens):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20))])
    asked = request(0, 0, tokens)
    one.propose([asked], PLAN, [9], context())
    one.finish(asked)
    assert not one._equal


def test_in_lossy_mode_an_answer_with_laws_is_followed_to_the_place_after_the_draft(make_rollout):
    one, answer = drafter(), with_laws(make_rollout(0, range(10, 20)))
    one.learn([answer])
    shapes = ((0, 4), (5, 4), (6, 4), (9, 1))
    asked = [request(0, 0, list(range(10, 10 + start))) for start, _ in shapes]
    trees = one.propose(asked, PLAN, [9] * len(asked), context("lossy"))
    for tree, (start, depth) in zip(trees, shapes, strict=True):
        assert tree.token_n == tuple(range(10 + start, 10 + start + depth)) and tree.followed is not None
        places = slice(start, start + depth + 1)
        assert np.array_equal(tree.followed.token_D, answer.token_T[places])
        assert answer.law_TK is not None and np.array_equal(tree.followed.law_DK, answer.law_TK[places])
    # where there is room for one token only, its place is followed all the same
    (tree,) = one.propose(asked[:1], PLAN, [0], context("lossy"))
    assert tree.token_n == () and tree.followed is not None and tree.followed.token_D.tolist() == [10]


def test_in_lossy_mode_a_token_drawn_anew_ends_it_even_if_it_is_the_old_one(make_rollout):
    one = drafter()
    one.learn([with_laws(make_rollout(0, range(10, 20)))])
    asked = request(0, 0, [10, 11])
    asked.proposers[-1] = Proposer.TARGET
    (tree,) = one.propose([asked], PLAN, [9], context("lossy"))
    assert tree.followed is None and tree.proposer == Proposer.SUFFIX


@pytest.mark.parametrize("why", ["no laws", "another stream", "another mode"])
def test_what_cannot_or_must_not_be_followed_is_drafted_as_ever(make_rollout, why):
    one, answer = drafter(), make_rollout(0, range(10, 20))
    one.learn([answer if why == "no laws" else with_laws(answer)])
    stream = Stream.EVAL if why == "another stream" else Stream.TRAIN
    mode: Mode = "matching" if why == "another mode" else "lossy"
    (tree,) = one.propose([request(0, 0, [10], Proposer.TARGET, stream)], PLAN, [9], context(mode))
    assert tree.token_n == (11, 12, 13, 14) and tree.followed is None and tree.proposer == Proposer.PREVIOUS
