"""Verification of draft trees. Two modes are lossless; they differ in whose draw decides. A third is lossy, and says so.

`matching`: the target draws its own token at every node with that position's key, and the walk goes on while a child carries that token.
The output is plain decoding's output by construction (Daliri et al. 2024, arXiv 2408.07978).

`rejection`: a drafted token stands with probability min(1, p / q), else the rest of p is drawn from (Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318). The output has plain decoding's distribution, not its tokens.

`lossy`: an old answer is followed by the lenient rule of SPEC-RL (`rollout/lenient.py`) up to the first token drawn anew; all else is `matching`.
The output has neither. A place is decided by its own accept number, and drawn anew with the target's own, which no draft has raced with: so what
comes out depends on the old answer, not on how many of its tokens are drafted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float64, Int32, Shaped
from torch import Tensor

from respec.rollout.lenient import Followed, Lenience, record, stands, weight_of
from respec.rollout.randomness import Lane, token_key, uniform
from respec.rollout.sampling import Draws, Processed, draw, process, race, refuse_non_finite
from respec.rollout.tree import ROOT, DraftTree, FlatTrees
from respec.types import Mode, Sampling


@dataclass(frozen=True)
class Verdict:
    """What stands of one request's tree: the accepted nodes from the top down, and a draw for each of them and for the token after.

    In `lossy` every draw has a weight and a recorded law, and `kept` of them are the old answer's (or the nodes', where none is followed): all of
    them, where the place after the last node kept its old token, too.
    """

    path: tuple[int, ...]
    draws: Draws
    kept: int
    weight: tuple[float, ...] = ()
    law: tuple[Shaped[np.ndarray, "K"], ...] = ()

    def weighed(self, depth: int) -> tuple[float, Shaped[np.ndarray, "K"] | None]:
        """Weight and recorded law of one draw; 1 and none in the other modes."""
        return (self.weight[depth], self.law[depth]) if self.law else (1.0, None)


def verify(
    trees: Sequence[DraftTree],
    flat: FlatTrees,
    logits: Float[Tensor, "M V"],
    mode: Mode,
    sampling: Sampling,
    lenience: Lenience | None = None,
) -> list[Verdict]:
    """Judges all trees of a pass from the target's logits; `lossy` needs a lenience. Raises NonFiniteError for logits that are not finite."""
    starts = [int(start) for start in flat.start_B]
    if mode == "rejection" and any(tree.token_n for tree in trees):
        return [_reject(tree, flat, start, logits, sampling) for tree, start in zip(trees, starts, strict=True)]
    draws = draw(logits, token_key(flat.key_M, flat.index_M, Lane.TARGET), sampling)
    verdicts = [_match(tree, draws, start) for tree, start in zip(trees, starts, strict=True)]
    if mode != "lossy":
        return verdicts
    assert lenience is not None, "mode lossy comes with its lenience"
    return [
        _recorded(verdict, start, logits, sampling, lenience)
        if tree.followed is None
        else _follow(tree, tree.followed, draws, flat, start, logits, sampling, lenience)
        for tree, verdict, start in zip(trees, verdicts, starts, strict=True)
    ]


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
    return Verdict(path, draws.take(_rows(start, path)), len(path))


def _rows(start: int, path: Sequence[int]) -> list[int]:
    """The rows of a pass that an accepted path's draws are of."""
    return [start, *(start + 1 + node for node in path)]


def _recorded(
    verdict: Verdict, start: int, logits: Float[Tensor, "M V"], sampling: Sampling, lenience: Lenience
) -> Verdict:
    """A verdict of `matching` with the laws that its tokens were drawn from."""
    drawn = zip(_rows(start, verdict.path), verdict.draws.token, strict=True)
    laws = tuple(record(_processed(logits, row, sampling).p, int(token), lenience.recorded) for row, token in drawn)
    return replace(verdict, weight=(1.0,) * len(laws), law=laws)


def _follow(
    tree: DraftTree,
    followed: Followed,
    draws: Draws,
    flat: FlatTrees,
    start: int,
    logits: Float[Tensor, "M V"],
    sampling: Sampling,
    lenience: Lenience,
) -> Verdict:
    """The lenient rule at each place of an old answer, up to the first that is drawn anew (`draws` are the target's own) or past its end."""
    parts, weights, laws = list[Draws](), list[float](), list[Shaped[np.ndarray, "K"]]()
    kept = 0
    for row in range(start, start + len(tree.token_n) + 1):
        target, drawn, weight, goes_on = _processed(logits, row, sampling), draws.take([row]), 1.0, False
        if kept < len(followed.token_D):
            old, law, where = int(followed.token_D[kept]), followed.law_DK[kept], slice(row, row + 1)
            accept = uniform(token_key(flat.key_M[where], flat.index_M[where], Lane.ACCEPT), np.zeros(1, np.uint64))
            goes_on = stands(target.p, law, old, lenience.factor, float(accept[0]))
            drawn = _drawn(target, old) if goes_on else drawn
            weight = weight_of(target.p, law, int(drawn.token[0]), lenience.factor)
        parts.append(drawn)
        weights.append(weight)
        laws.append(record(target.p, int(drawn.token[0]), lenience.recorded))
        if not goes_on:
            break
        kept += 1
    path = tuple(range(len(parts) - 1))
    return Verdict(path, Draws.join(parts), kept, tuple(weights), tuple(laws))


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
        target = _processed(logits, row, sampling)
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
    return Verdict(tuple(path), Draws.join(draws), len(path))


def _processed(logits: Float[Tensor, "M V"], row: int, sampling: Sampling) -> Processed:
    target = process(logits[row].double().cpu().numpy(), sampling)
    refuse_non_finite(np.array([target.entropy]))
    return target


def _drawn(target: Processed, token: int) -> Draws:
    return Draws(
        np.array([token], np.int32), *(np.array([value], np.float32) for value in (target.logp[token], target.kept_logmass, target.entropy))
    )  # fmt: skip
