"""The suffix drafter: what the other samples of this prompt, and its earlier epochs, went on to say (DAS, arXiv 2511.13841).

Each prompt in play has a suffix automaton over its histories and over its group's samples in the making. A sequence's place in it is
the state of its whole prefix; the longest suffix that anything has followed gives the candidates, their counts the odds.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int32

from respec.rollout.draft.protocol import DraftContext
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Rollout

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

    def follow(
        self, last: int, depth: int, min_match: int, min_confidence: float, lead: list[float] | None = None
    ) -> list[int]:
        """The most frequent continuation of string(last), while its estimated probability stays at or above `min_confidence`.

        Where nothing has followed, the context is shortened to its longest suffix that something followed, of at least `min_match`
        tokens. The estimate of one step is count / (all counts + 1): what was seen once counts for a half. To `lead` it adds how sure it is of each
        token: the log odds of that estimate, and log(1 + length of the context that it followed), since long ones are hardly chance.
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
            if lead is not None:
                lead.append(math.log(best / (total + 1 - best) * (1 + self.length[state])))
            state = self.next[state][token]
        return draft

    def branch(
        self, last: int, depth: int, width: int, nodes: int, min_match: int, min_confidence: float
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most probable continuations of string(last): at most `nodes`, `width` to a parent, best first.

        A node's estimate is the product of those of `follow` along its path, and stays at or above `min_confidence / width`.
        """
        tokens, parents, depths, states = list[int](), list[int](), list[int](), list[int]()
        heap: list[tuple[float, int, int, int]] = []
        arrivals = 0

        def offer(state: int, parent: int, confidence: float) -> None:
            nonlocal arrivals
            while state != ROOT and not self.next[state]:
                state = self.link[state]
            if self.length[state] < min_match:
                return
            edges = self.next[state]
            total = sum(self.count[target] for target in edges.values()) + 1
            best = sorted(edges.items(), key=lambda edge: -self.count[edge[1]])[:width]
            for token, target in best:
                estimate = confidence * self.count[target] / total
                if estimate * width >= min_confidence:
                    heapq.heappush(heap, (-estimate, arrivals, parent, token))
                    targets[arrivals] = target
                    arrivals += 1

        targets: dict[int, int] = {}
        if depth:
            offer(last, -1, 1.0)
        while heap and len(tokens) < nodes:
            estimate, arrival, parent, token = heapq.heappop(heap)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(1 if parent == -1 else depths[parent] + 1)
            states.append(targets[arrival])
            if depths[node] < depth:
                offer(states[node], node, -estimate)
        return tokens, parents

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

    name = "suffix"

    def __init__(self, min_match: int, min_confidence: float, history_tokens: int) -> None:
        self._min_match, self._min_confidence, self._budget = min_match, min_confidence, history_tokens
        self._history: OrderedDict[int, list[Int32[np.ndarray, "T"]]] = OrderedDict()
        self._held = 0
        self._groups: dict[int, _Group] = {}
        self._finished: dict[int, list[list[int]]] = {}

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext | None
    ) -> list[DraftTree]:
        # everybody's new tokens first, so that each draft sees all siblings as they stand
        places = [self._catch_up(request) for request in requests]
        return [
            self._tree(group.automaton, place.state, plan, min(plan.s, limit))
            for (group, place), limit in zip(places, limits, strict=True)
        ]

    def guess(self, requests: Sequence[Request], depth: int, limits: Sequence[int]) -> list[DraftTree]:
        """For each request the chain of most frequent tokens, however unsure, with a lead for each."""
        places = [self._catch_up(request) for request in requests]
        chains = []
        for (group, place), limit in zip(places, limits, strict=True):
            lead: list[float] = []
            tokens = group.automaton.follow(place.state, min(depth, limit), self._min_match, 0.0, lead)
            chains.append(replace(DraftTree.chain(tokens, Proposer.SUFFIX), lead_n=tuple(lead)))
        return chains

    def _tree(self, automaton: SuffixAutomaton, state: int, plan: Plan, depth: int) -> DraftTree:
        if plan.t == 1:
            tokens = automaton.follow(state, min(depth, plan.n), self._min_match, self._min_confidence)
            return DraftTree.chain(tokens, Proposer.SUFFIX)
        tokens, parents = automaton.branch(state, depth, plan.t, plan.n, self._min_match, self._min_confidence)
        return DraftTree(tuple(tokens), tuple(parents), Proposer.SUFFIX)

    def finish(self, request: Request) -> None:
        row = request.ask.prompt.row
        if row in self._groups:
            group, _ = self._catch_up(request)
            group.places.pop(id(request))
        else:
            # nobody has drafted from this group: its automaton is built when somebody does
            self._finished.setdefault(row, []).append(request.tokens)

    def drop(self) -> None:
        self._groups.clear()
        self._finished.clear()

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Remembers finished completions by row; past the token budget the rows longest out of play are forgotten."""
        for rollout in rollouts:
            self._history.setdefault(rollout.prompt.row, []).append(rollout.token_T)
            self._history.move_to_end(rollout.prompt.row)
            self._held += len(rollout.token_T)
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
        histories = (tokens.tolist() for tokens in self._history.get(row, ()))
        for tokens in (*histories, *self._finished.pop(row, ())):
            state = start
            for token in tokens:
                state = automaton.extend(state, token)
        return _Group(automaton, start)
