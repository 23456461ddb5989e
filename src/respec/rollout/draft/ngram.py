"""Prompt look-up: what followed the last n tokens when this sequence had them before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from respec.rollout.request import Request
from respec.types import Plan, Proposer

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

    proposer = Proposer.NGRAM

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tables: dict[int, _Table] = {}

    def propose(self, requests: Sequence[Request], plan: Plan, limits: Sequence[int]) -> list[list[int]]:
        return [self._propose(request, min(plan.s, limit)) for request, limit in zip(requests, limits, strict=True)]

    def finish(self, request: Request) -> None:
        self._tables.pop(id(request), None)

    def learn(self, row: int, completions: Iterable[Int32[np.ndarray, "T"]]) -> None:
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
