"""The previous drafter drafts a slot's own old answer while it holds, then hands over, and forgets within its budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.request import Request
from respec.types import Ask, Plan, Prompt, Proposer, Stream

NO_CONTEXT: Any = None  # neither drafter reads it
PLAN = Plan("previous", 4, 1, 4)


def drafter(budget: int = 1000) -> PreviousDrafter:
    return PreviousDrafter(SuffixDrafter(1, 0.1, 1000), budget)


def request(row: int, sample: int, tokens: list[int]) -> Request:
    return Request(
        Ask(Prompt(row, "", (3,)), Stream.TRAIN, 1, 2), sample, np.zeros(1, np.uint64), 0, tokens=list(tokens)
    )


def test_the_old_answer_is_drafted_while_the_completion_equals_it(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20), sample=0), make_rollout(0, range(30, 40), sample=1)])
    asked = [request(0, 0, []), request(0, 1, [30, 31]), request(0, 0, list(range(10, 18)))]
    trees = one.propose(asked, PLAN, [9, 9, 9], NO_CONTEXT)
    assert [tree.token_n for tree in trees] == [(10, 11, 12, 13), (32, 33, 34, 35), (18, 19)]
    assert all(tree.proposer == Proposer.PREVIOUS and not tree.law for tree in trees)
    assert one.propose(asked[:1], PLAN, [2], NO_CONTEXT)[0].token_n == (10, 11)
    assert one.propose(asked[:1], PLAN, [0], NO_CONTEXT)[0].token_n == ()


def test_after_the_first_difference_the_suffix_drafter_goes_on_for_good(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20))])
    asked = request(0, 0, [10, 11])
    assert one.propose([asked], PLAN, [9], NO_CONTEXT)[0].proposer == Proposer.PREVIOUS
    asked.tokens += [9, 13]
    (tree,) = one.propose([asked], PLAN, [9], NO_CONTEXT)
    assert tree.proposer == Proposer.SUFFIX and tree.token_n[0] == 14
    # a stranger has no old answer, a slot past its old answer's end no rest of one
    for other in (request(0, 1, [10]), request(0, 0, list(range(10, 20)))):
        assert one.propose([other], PLAN, [9], NO_CONTEXT)[0].proposer == Proposer.SUFFIX


def test_the_last_answer_counts_and_a_dropped_drafter_finds_its_place_from_the_tokens(make_rollout):
    one = drafter()
    one.learn([make_rollout(0, range(10, 20)), make_rollout(0, range(20, 30), draw=1)])
    asked = request(0, 0, [20])
    one.propose([asked], PLAN, [9], NO_CONTEXT)
    one.drop()
    asked.tokens += [21, 22]
    assert one.propose([asked], PLAN, [9], NO_CONTEXT)[0].token_n == (23, 24, 25, 26)


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
    one.propose([asked], PLAN, [9], NO_CONTEXT)
    one.finish(asked)
    assert not one._equal
