"""The previous drafter: what this prompt and sample slot answered last time (SPEC-RL, arXiv 2509.23232, made exact).

An old answer is drafted from the completion's beginning while the completion is a beginning of it. From the first difference on the suffix
drafter, which knows that answer too, goes on for the request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from respec.rollout.draft.protocol import DraftContext
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Rollout


class PreviousDrafter:
    """Old answers by dataset row and sample, within a budget of tokens (the row longest out of play leaves first).

    `suffix` is this drafter's own: it is told of all that happens here, and must not be given to the engine beside it.
    """

    name = "previous"

    def __init__(self, suffix: SuffixDrafter, history_tokens: int) -> None:
        self._suffix = suffix
        self._budget = history_tokens
        self._answers: OrderedDict[int, dict[int, Int32[np.ndarray, "T"]]] = OrderedDict()
        self._held = 0
        # how many of a request's tokens have been found equal to its old answer, up to the first difference
        self._equal: dict[int, int] = {}

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext | None
    ) -> list[DraftTree]:
        trees = [
            DraftTree.chain(self._rest(request)[: min(plan.s, plan.n, limit)].tolist(), Proposer.PREVIOUS)
            for request, limit in zip(requests, limits, strict=True)
        ]
        others = [i for i, request in enumerate(requests) if not len(self._rest(request))]
        theirs = self._suffix.propose([requests[i] for i in others], plan, [limits[i] for i in others], context)
        for i, tree in zip(others, theirs, strict=True):
            trees[i] = tree
        return trees

    def finish(self, request: Request) -> None:
        self._equal.pop(id(request), None)
        self._suffix.finish(request)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Remembers the last answer of each row and sample; past the token budget the rows longest out of play are forgotten."""
        for rollout in rollouts:
            answers = self._answers.setdefault(rollout.prompt.row, {})
            self._held += len(rollout.token_T) - len(answers.get(rollout.sample, ()))
            answers[rollout.sample] = rollout.token_T
            self._answers.move_to_end(rollout.prompt.row)
        # what is still in the making is compared anew, with the new answers
        self._equal.clear()
        while self._held > self._budget and self._answers:
            _, oldest = self._answers.popitem(last=False)
            self._held -= sum(map(len, oldest.values()))
        self._suffix.learn(rollouts)

    def drop(self) -> None:
        self._equal.clear()
        self._suffix.drop()

    def _rest(self, request: Request) -> Int32[np.ndarray, "rest"]:
        """What the old answer says next: nothing once the completion differs from it, or has come to its end."""
        answer = self._answers.get(request.ask.prompt.row, {}).get(request.sample)
        if answer is None:
            return np.zeros(0, np.int32)
        equal = self._equal.get(id(request), 0)
        while equal < min(len(request.tokens), len(answer)) and answer[equal] == request.tokens[equal]:
            equal += 1
        self._equal[id(request)] = equal
        return answer[equal:] if equal == len(request.tokens) else answer[:0]
