"""Verification of draft trees. Both modes are lossless; they differ in whose draw decides.

`matching`: the target draws its own token at every node with that position's key, and the walk goes on while a child carries that token.
The output is plain decoding's output by construction (Daliri et al. 2024, arXiv 2408.07978).

`rejection`: a drafted token stands with probability min(1, p / q), else the rest of p is drawn from (Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318). The output has plain decoding's distribution, not its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32
from torch import Tensor

from respec.rollout.randomness import Lane, token_key, uniform
from respec.rollout.sampling import Draws, Processed, draw, process, race, refuse_non_finite
from respec.rollout.tree import ROOT, DraftTree, FlatTrees
from respec.types import Mode, Sampling


@dataclass(frozen=True)
class Verdict:
    """What stands of one request's tree: the accepted nodes from the top down, and a draw for each of them and for the token after."""

    path: tuple[int, ...]
    draws: Draws


def verify(
    trees: Sequence[DraftTree],
    flat: FlatTrees,
    logits: Float[Tensor, "M V"],
    mode: Mode,
    sampling: Sampling,
) -> list[Verdict]:
    """Judges all trees of a pass from the target's logits. Raises NonFiniteError for logits that are not finite."""
    if mode == "matching" or all(not tree.token_n for tree in trees):
        draws = draw(logits, token_key(flat.key_M, flat.index_M, Lane.TARGET), sampling)
        return [_match(tree, draws, int(start)) for tree, start in zip(trees, flat.start_B, strict=True)]
    return [_reject(tree, flat, int(start), logits, sampling) for tree, start in zip(trees, flat.start_B, strict=True)]


def matched_path(tree: DraftTree, drawn: Int32[np.ndarray, "n+1"]) -> tuple[int, ...]:
    """The accepted nodes; drawn[0] is the target's draw after the pending token, drawn[1 + i] that after node i."""
    path: list[int] = []
    at = ROOT
    while True:
        token = drawn[at + 1]
        at = next((child for child in tree.children.get(at, ()) if tree.token_n[child] == token), ROOT)
        if at == ROOT:
            return tuple(path)
        path.append(at)


def judge_children(
    p: Float64[np.ndarray, "V"],
    children: Sequence[int],
    law: Float64[np.ndarray, "V"] | None,
    accept: Float64[np.ndarray, "children"],
) -> tuple[int | None, Float64[np.ndarray, "V"]]:
    """Which of a node's children (their tokens, in order) stands, by index, or None; and what is left of p to draw from then.

    Child j was drawn from q_j, which is `law` without the earlier children; with no law q_j is all on the child itself. It
    stands where accept[j] < p_j / q_j, else p_{j+1} = norm(max(0, p_j - q_j)). Where that has no mass, p_j stays.
    """
    q = law
    for j, token in enumerate(children):
        if law is None:
            q = np.zeros_like(p)
            q[token] = 1.0
        assert q is not None
        if q[token] > 0 and accept[j] * q[token] < p[token]:
            return j, p
        left = np.maximum(p - q, 0.0)
        total = left.sum()
        p = left / total if total > 0 else p
        if law is not None:
            q = q.copy()
            q[token] = 0.0
            mass = q.sum()
            if mass <= 0:
                break
            q = q / mass
    return None, p


def _match(tree: DraftTree, draws: Draws, start: int) -> Verdict:
    path = matched_path(tree, draws.token[start : start + len(tree.token_n) + 1])
    return Verdict(path, draws.take([start, *(start + 1 + node for node in path)]))


def _reject(
    tree: DraftTree,
    flat: FlatTrees,
    start: int,
    logits: Float[Tensor, "M V"],
    sampling: Sampling,
) -> Verdict:
    path: list[int] = []
    draws: list[Draws] = []
    at = ROOT
    while True:
        row = start + 1 + at
        where = slice(row, row + 1)
        children = tree.children.get(at, ())
        if not children:
            draws.append(draw(logits[where], token_key(flat.key_M[where], flat.index_M[where], Lane.TARGET), sampling))
            break
        target = process(logits[row].double().cpu().numpy(), sampling)
        refuse_non_finite(np.array([target.entropy]))
        key = token_key(flat.key_M[where], flat.index_M[where], Lane.ACCEPT)
        tokens = [tree.token_n[child] for child in children]
        accept = uniform(key, np.arange(len(children), dtype=np.uint64))
        stands, left = judge_children(target.p, tokens, tree.law.get(at), accept)
        if stands is None:
            residual = token_key(flat.key_M[where], flat.index_M[where], Lane.RESIDUAL)
            draws.append(_drawn(target, int(race(left, residual, 1)[0])))
            break
        draws.append(_drawn(target, tokens[stands]))
        at = children[stands]
        path.append(at)
    return Verdict(tuple(path), Draws.join(draws))


def _drawn(target: Processed, token: int) -> Draws:
    return Draws(
        np.array([token], np.int32), *(np.array([value], np.float32) for value in (target.logp[token], target.kept_logmass, target.entropy))
    )  # fmt: skip
