"""The previous drafter: what this prompt and sample slot answered last time (SPEC-RL, arXiv 2509.23232, made exact).

An old answer is drafted from the completion's beginning while the completion is a beginning of it. From the first difference on the suffix
drafter, which knows that answer too, goes on for the request.

In mode `lossy` an answer that recorded its laws is followed by the paper's own lenient rule: until a token is drawn anew, even if that is the old one
again. It must be an answer of the same stream: what is evaluated is never followed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Shaped

from respec.rollout.draft.protocol import DraftContext
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.lenient import Followed
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Mode, Plan, Proposer, Rollout, Stream


@dataclass(frozen=True)
class Answer:
    """An old completion; `law_TK` is what it recorded in mode `lossy`, None in the others."""

    token_T: Int32[np.ndarray, "T"]
    law_TK: Shaped[np.ndarray, "T K"] | None
    stream: Stream

    def chain(self, start: int, depth: int, followed: bool) -> DraftTree:
        """Its next `depth` tokens from `start` on; where it is followed leniently, with the place after them."""
        tokens = self.token_T[start : start + depth]
        if not followed or self.law_TK is None:
            return DraftTree.chain(tokens.tolist(), Proposer.PREVIOUS)
        places = slice(start, start + depth + 1)
        return DraftTree.chain(tokens.tolist(), Proposer.PREVIOUS, Followed(self.token_T[places], self.law_TK[places]))


class PreviousDrafter:
    """Old answers by dataset row and sample, within a budget of tokens (the row longest out of play leaves first). In mode `lossy` a
    token takes 8 bytes for each recorded token of its law, in the others 4 in all.

    `suffix` is this drafter's own: it is told of all that happens here, and must not be given to the engine beside it.
    """

    name = "previous"

    def __init__(self, suffix: SuffixDrafter, history_tokens: int) -> None:
        self._suffix = suffix
        self._budget = history_tokens
        self._answers: OrderedDict[int, dict[int, Answer]] = OrderedDict()
        self._held = 0
        # how many of a request's tokens have been found equal to its old answer, up to the first difference
        self._equal: dict[int, int] = {}

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext | None
    ) -> list[DraftTree]:
        mode: Mode = context.mode if context is not None else "matching"
        trees = [
            self._follow(request, min(plan.s, plan.n, limit), mode)
            for request, limit in zip(requests, limits, strict=True)
        ]
        others = [i for i, tree in enumerate(trees) if tree is None]
        theirs = self._suffix.propose([requests[i] for i in others], plan, [limits[i] for i in others], context)
        handed_over = dict(zip(others, theirs, strict=True))
        return [handed_over[i] if tree is None else tree for i, tree in enumerate(trees)]

    def finish(self, request: Request) -> None:
        self._equal.pop(id(request), None)
        self._suffix.finish(request)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Remembers the last answer of each row and sample; past the token budget the rows longest out of play are forgotten."""
        for rollout in rollouts:
            answers = self._answers.setdefault(rollout.prompt.row, {})
            before = answers.get(rollout.sample)
            self._held += len(rollout.token_T) - (len(before.token_T) if before is not None else 0)
            answers[rollout.sample] = Answer(rollout.token_T, rollout.law_TK, rollout.stream)
            self._answers.move_to_end(rollout.prompt.row)
        # what is still in the making is compared anew, with the new answers
        self._equal.clear()
        while self._held > self._budget and self._answers:
            _, oldest = self._answers.popitem(last=False)
            self._held -= sum(len(answer.token_T) for answer in oldest.values())
        self._suffix.learn(rollouts)

    def drop(self) -> None:
        self._equal.clear()
        self._suffix.drop()

    def _follow(self, request: Request, depth: int, mode: Mode) -> DraftTree | None:
        """A draft of what the old answer says next: None once the completion differs from it, or has come to its end."""
        answer = self._answers.get(request.ask.prompt.row, {}).get(request.sample)
        if answer is None:
            return None
        equal = self._equal.get(id(request), 0)
        while equal < min(len(request.tokens), len(answer.token_T)) and answer.token_T[equal] == request.tokens[equal]:
            equal += 1
        self._equal[id(request)] = equal
        if equal < len(request.tokens) or equal == len(answer.token_T):
            return None
        followed = mode == "lossy" and answer.law_TK is not None and answer.stream == request.ask.stream
        # a token drawn anew is the target's, and ends it
        if followed and request.proposers and request.proposers[-1] != Proposer.PREVIOUS:
            return None
        return answer.chain(equal, depth, followed)
