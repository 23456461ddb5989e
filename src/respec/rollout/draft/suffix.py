"""The suffix drafter: what the other samples of this prompt, and its earlier epochs, went on to say (DAS, arXiv 2511.13841).

Each prompt in play has a suffix automaton over its histories and over its group's samples in the making. A sequence's place in it is
the state of its whole prefix; the longest suffix that anything has followed gives the candidates, their counts the odds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from respec.rollout.request import Request
from respec.types import Plan, Proposer

ROOT = 0


class SuffixAutomaton:
    """All substrings of the strings fed to it, with the number of times each has occurred (Blumer et al. 1985, for several strings).

    State 0 is the empty string. `extend` is amortised constant apart from the counts, which cost the number of distinct suffix classes.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]

    def extend(self, last: int, token: int) -> int:
        """The state of string(last) + token, made if it is new; counts one more occurrence of each of its suffixes."""
        state = self._state(last, token)
        walk = state
        while walk > ROOT:
            self.count[walk] += 1
            walk = self.link[walk]
        return state

    def follow(self, last: int, depth: int, min_match: int, min_confidence: float) -> list[int]:
        """The most frequent continuation of string(last), while its estimated probability stays at or above `min_confidence`.

        Where nothing has followed, the context is shortened to its longest suffix that something followed, of at least `min_match`
        tokens. The estimate of one step is count / (all counts + 1): what was seen once counts for a half.
        """
        draft: list[int] = []
        state, confidence = last, 1.0
        while len(draft) < depth:
            while state != ROOT and not self.next[state]:
                state = self.link[state]
            if self.length[state] < min_match or not self.next[state]:
                break
            total, best, token = 0, 0, -1
            for candidate, target in self.next[state].items():
                occurred = self.count[target]
                total += occurred
                if occurred > best:
                    best, token = occurred, candidate
            confidence *= best / (total + 1)
            if confidence < min_confidence:
                break
            draft.append(token)
            state = self.next[state][token]
        return draft

    def _state(self, last: int, token: int) -> int:
        known = self.next[last].get(token)
        if known is not None:
            return known if self.length[known] == self.length[last] + 1 else self._clone(last, token, known)
        made = self._add({}, self.length[last] + 1, 0)
        walk = last
        while walk != -1 and token not in self.next[walk]:
            self.next[walk][token] = made
            walk = self.link[walk]
        if walk == -1:
            self.link[made] = ROOT
            return made
        target = self.next[walk][token]
        self.link[made] = target if self.length[target] == self.length[walk] + 1 else self._clone(walk, token, target)
        return made

    def _clone(self, parent: int, token: int, original: int) -> int:
        clone = self._add(dict(self.next[original]), self.length[parent] + 1, self.count[original])
        self.link[clone] = self.link[original]
        self.link[original] = clone
        walk = parent
        while walk != -1 and self.next[walk].get(token) == original:
            self.next[walk][token] = clone
            walk = self.link[walk]
        return clone

    def _add(self, edges: dict[int, int], length: int, count: int) -> int:
        self.next.append(edges)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1


@dataclass
class _Place:
    """Where a request stands: its state, and how many of its completion's tokens led there."""

    state: int
    taken: int = 0


@dataclass
class _Group:
    """One prompt in play: its automaton and the places of its samples in the making."""

    automaton: SuffixAutomaton
    start: int
    places: dict[int, _Place] = field(default_factory=dict)


class SuffixDrafter:
    """Histories by dataset row, within a budget of tokens (the row longest out of play leaves first); automata for rows in play.

    Histories are tokens, not anything computed from weights: a swap leaves them valid.
    """

    proposer = Proposer.SUFFIX

    def __init__(self, min_match: int, min_confidence: float, history_tokens: int) -> None:
        self._min_match, self._min_confidence, self._budget = min_match, min_confidence, history_tokens
        self._history: OrderedDict[int, list[Int32[np.ndarray, "T"]]] = OrderedDict()
        self._held = 0
        self._groups: dict[int, _Group] = {}

    def propose(self, requests: Sequence[Request], plan: Plan, limits: Sequence[int]) -> list[list[int]]:
        # everybody's new tokens first, so that each draft sees all siblings as they stand
        places = [self._catch_up(request) for request in requests]
        return [
            group.automaton.follow(place.state, min(plan.s, limit), self._min_match, self._min_confidence)
            for (group, place), limit in zip(places, limits, strict=True)
        ]

    def finish(self, request: Request) -> None:
        group, _ = self._catch_up(request)
        del group.places[id(request)]

    def drop(self) -> None:
        self._groups.clear()

    def learn(self, row: int, completions: Iterable[Int32[np.ndarray, "T"]]) -> None:
        """Remembers a row's finished completions; past the token budget the rows longest out of play are forgotten."""
        held = self._history.setdefault(row, [])
        self._history.move_to_end(row)
        for tokens in completions:
            held.append(tokens)
            self._held += len(tokens)
        while self._held > self._budget and self._history:
            _, oldest = self._history.popitem(last=False)
            self._held -= sum(len(tokens) for tokens in oldest)

    def _catch_up(self, request: Request) -> tuple[_Group, _Place]:
        row = request.ask.prompt.row
        group = self._groups.get(row)
        if group is None:
            group = self._groups[row] = self._build(row, request.ask.prompt.token_ids)
        place = group.places.get(id(request))
        if place is None:
            place = group.places[id(request)] = _Place(group.start)
        for token in request.tokens[place.taken :]:
            place.state = group.automaton.extend(place.state, token)
        place.taken = len(request.tokens)
        return group, place

    def _build(self, row: int, prompt: Sequence[int]) -> _Group:
        automaton = SuffixAutomaton()
        start = ROOT
        for token in prompt:
            start = automaton.extend(start, token)
        for tokens in self._history.get(row, ()):
            state = start
            for token in tokens.tolist():
                state = automaton.extend(state, token)
        return _Group(automaton, start)
