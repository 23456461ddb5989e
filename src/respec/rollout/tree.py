"""Draft trees, and how the trees of a batch lie end to end in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from respec.models.decoder import Branches
from respec.rollout.lenient import Followed
from respec.rollout.request import Request
from respec.types import Proposer

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """What may follow a request's pending token. Made by a drafter, read by verification.

    Node i carries `token_n[i]` and hangs on node `parent_n[i]`, which comes before it, or on the pending token (ROOT). The children of
    a node are tried in their order. `law` gives, by parent, the distribution that its children were drawn from without replacement, in that order;
    the children of a parent that is not in it were not drawn for this position (looked up, or chosen by their probability). `followed`, only in
    mode `lossy` and of chains, is the old answer by which the draft is judged.

    `lead_n`, of chains whose drafter was asked for it, says by how much each node won its race (`types.Leads`); where the drafter stopped at a token
    that is not worth a row, that token is `left_out`, and the last lead is its. `rivals` are the chains that this one was chosen from, the plan's
    drafter's first.
    """

    token_n: tuple[int, ...] = ()
    parent_n: tuple[int, ...] = ()
    proposer: Proposer = Proposer.TARGET
    law: Mapping[int, Float64[np.ndarray, "V"]] = field(default_factory=dict)
    followed: Followed | None = None
    lead_n: tuple[float, ...] = ()
    left_out: int | None = None
    rivals: tuple[DraftTree, ...] = ()

    @classmethod
    def chain(cls, tokens: Iterable[int], proposer: Proposer, followed: Followed | None = None) -> DraftTree:
        """One token after the other."""
        held = tuple(tokens)
        return cls(held, tuple(range(-1, len(held) - 1)), proposer, followed=followed)

    @cached_property
    def is_chain(self) -> bool:
        return self.parent_n == tuple(range(-1, len(self.parent_n) - 1))

    @cached_property
    def depth_n(self) -> tuple[int, ...]:
        """Of each node; a child of the pending token has depth 1."""
        depths: list[int] = []
        for parent in self.parent_n:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> Mapping[int, tuple[int, ...]]:
        """Nodes by parent, in order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent_n):
            found.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in found.items()}

    def until(self, ends: frozenset[int]) -> DraftTree:
        """Without what hangs on a token of `ends`: after those an environment speaks, which is not drafted."""
        if ends.isdisjoint(self.token_n):
            return self
        place = {ROOT: ROOT}
        for node, parent in enumerate(self.parent_n):
            if parent in place and (parent == ROOT or self.token_n[parent] not in ends):
                place[node] = len(place) - 1
        kept = [node for node in place if node != ROOT]
        return DraftTree(
            tuple(self.token_n[node] for node in kept),
            tuple(place[self.parent_n[node]] for node in kept),
            self.proposer,
            {
                place[at]: law
                for at, law in self.law.items()
                if at in place and (at == ROOT or self.token_n[at] not in ends)
            },
            self.followed,
        )

    def path(self, node: int) -> list[int]:
        """From the pending token's child down to the node."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent_n[node]
        return nodes[::-1]


NOTHING = DraftTree()


@dataclass(frozen=True)
class FlatTrees:
    """The pending tokens and draft nodes of a batch end to end: request r has the rows from start_B[r] on, its pending token first.

    `index_M` is the place in the completion that a row's draw is for. A node of a branching tree lies in the cache behind the pending
    token in its node's order, whatever its depth; `branches` says so, and is None when all trees are chains.
    """

    token_M: Int64[np.ndarray, "M"]
    slot_M: Int64[np.ndarray, "M"]
    position_M: Int64[np.ndarray, "M"]
    index_M: Int64[np.ndarray, "M"]
    key_M: UInt64[np.ndarray, "M"]
    start_B: Int64[np.ndarray, "B"]
    branches: Branches | None


def flatten(active: Sequence[Request], trees: Sequence[DraftTree]) -> FlatTrees:
    """Lays a batch out for one pass; see FlatTrees."""
    rows = np.array([len(tree.token_n) + 1 for tree in trees])
    start = np.cumsum(rows) - rows
    tokens = [token for request, tree in zip(active, trees, strict=True) for token in (request.pending, *tree.token_n)]
    depth = np.array([d for tree in trees for d in (0, *tree.depth_n)], np.int64)
    position = np.repeat(np.array([request.length - 1 for request in active], np.int64), rows) + depth
    return FlatTrees(
        token_M=np.array(tokens, np.int64),
        slot_M=np.repeat(np.array([request.slot for request in active], np.int64), rows),
        position_M=position,
        index_M=np.repeat(np.array([len(request.tokens) for request in active], np.int64), rows) + depth,
        key_M=np.repeat(np.concatenate([request.key for request in active]), rows),
        start_B=start,
        branches=None if all(tree.is_chain for tree in trees) else _branches(active, trees, rows, start),
    )


def _branches(
    active: Sequence[Request], trees: Sequence[DraftTree], rows: Int64[np.ndarray, "B"], start: Int64[np.ndarray, "B"]
) -> Branches:
    deepest = max(max(tree.depth_n, default=0) for tree in trees)
    path = np.zeros((int(rows.sum()), deepest), np.int64)
    fork = np.repeat(np.array([request.length for request in active], np.int64), rows)
    write = fork - 1 + np.arange(len(fork)) - np.repeat(start, rows)
    for request, tree, first in zip(active, trees, start, strict=True):
        for node, (parent, depth) in enumerate(zip(tree.parent_n, tree.depth_n, strict=True)):
            row = first + 1 + node
            if parent != ROOT:
                path[row, : depth - 1] = path[first + 1 + parent, : depth - 1]
            path[row, depth - 1] = request.length + node
    return Branches(write, fork, path)
