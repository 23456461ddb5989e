"""Prompt look-up: what followed the last n tokens when this sequence had them before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from respec.rollout.draft.protocol import DraftContext
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Rollout

LONGEST = 4


@dataclass
class _Table:
    """Every n-gram of one sequence, n up to LONGEST, with the place after its last occurrence that has something after it."""

    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(LONGEST, end) + 1):
                self.after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)


class NgramDrafter:
    """Looks in the sequence's own prompt and completion, longest context first, no shorter than `min_match`."""

    name = "ngram"

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tables: dict[int, _Table] = {}

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext | None
    ) -> list[DraftTree]:
        return [
            DraftTree.chain(self._propose(request, min(plan.s, plan.n, limit)), Proposer.NGRAM)
            for request, limit in zip(requests, limits, strict=True)
        ]

    def finish(self, request: Request) -> None:
        self._tables.pop(id(request), None)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: it looks no further than the sequence itself."""

    def drop(self) -> None:
        self._tables.clear()

    def _propose(self, request: Request, depth: int) -> list[int]:
        table = self._tables.setdefault(id(request), _Table())
        prompt = request.ask.prompt.token_ids
        if not table.tokens:
            table.extend(prompt)
        table.extend(request.tokens[len(table.tokens) - len(prompt) :])
        for n in range(min(LONGEST, len(table.tokens)), self._min_match - 1, -1):
            start = table.after.get(tuple(table.tokens[-n:]))
            if start is not None:
                return table.tokens[start : start + depth]
        return []
