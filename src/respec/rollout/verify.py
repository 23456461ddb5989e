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
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int32, Int64, Shaped
from torch import Tensor

from respec.rollout.lenient import Lenience, record, stands, weights_of
from respec.rollout.randomness import Lane, token_key, uniform
from respec.rollout.sampling import Draws, Processed, draw, process, race, refuse_non_finite, truncates
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
    weight_T: Float64[np.ndarray, "T"] | None = None
    law_TK: Shaped[np.ndarray, "T K"] | None = None

    def weighed(self, depth: int) -> tuple[float, Shaped[np.ndarray, "K"] | None]:
        """Weight and recorded law of one draw; 1 and none in the other modes."""
        if self.weight_T is None or self.law_TK is None:
            return 1.0, None
        return float(self.weight_T[depth]), self.law_TK[depth]


@dataclass(frozen=True)
class Laws:
    """`sampling.Processed` of many rows."""

    logp: Float64[np.ndarray, "R V"]
    p: Float64[np.ndarray, "R V"]
    kept_logmass: Float64[np.ndarray, "R"]
    entropy: Float64[np.ndarray, "R"]


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
    return _judge_leniently(trees, verdicts, draws, flat, logits, sampling, lenience)


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


def _judge_leniently(
    trees: Sequence[DraftTree],
    matched: Sequence[Verdict],
    draws: Draws,
    flat: FlatTrees,
    logits: Float[Tensor, "M V"],
    sampling: Sampling,
    lenience: Lenience,
) -> list[Verdict]:
    """Mode `lossy`: the lenient rule along the old answers, up to the first token drawn anew; elsewhere what `matched` says stands.

    `draws` are the target's own, which is what is drawn anew. All places of the pass are looked at together.
    """
    rows_B = [
        list(range(start, start + len(tree.token_n) + 1)) if tree.followed else _rows(start, verdict.path)
        for tree, verdict, start in zip(trees, matched, flat.start_B.tolist(), strict=True)
    ]
    rows = np.array([row for part in rows_B for row in part])
    end_B = np.cumsum([len(part) for part in rows_B])
    laws, mine = _laws(logits, rows, sampling), draws.take(rows.tolist())
    stood, weight = np.zeros(len(rows), bool), np.ones(len(rows))
    answers = [
        (end - len(part), tree.followed) for tree, part, end in zip(trees, rows_B, end_B, strict=True) if tree.followed
    ]
    if answers:
        at = np.concatenate([first + np.arange(len(old.token_D)) for first, old in answers])
        old = np.concatenate([answer.token_D for _, answer in answers])
        q = np.concatenate([answer.law_DK for _, answer in answers])
        accept = uniform(token_key(flat.key_M[rows[at]], flat.index_M[rows[at]], Lane.ACCEPT), np.zeros(1, np.uint64))
        stood[at] = stands(laws.p[at], q, old, lenience.factor, accept)
        mine = _with(mine, laws, at[stood[at]], old[stood[at]])
        weight[at] = weights_of(laws.p[at], q, mine.token[at], lenience.factor)
    recorded, verdicts = record(laws.p, mine.token, lenience.recorded), list[Verdict]()
    for tree, verdict, part, end in zip(trees, matched, rows_B, end_B, strict=True):
        path, kept = verdict.path, verdict.kept
        if tree.followed:
            kept = int(np.append(stood[end - len(part) : end], False).argmin())
            path = tuple(range(min(kept, len(tree.token_n))))
        its = np.arange(end - len(part), end)[: len(path) + 1]
        verdicts.append(Verdict(path, mine.take(its.tolist()), kept, weight[its], recorded[its]))
    return verdicts


def _with(draws: Draws, laws: Laws, at: Int64[np.ndarray, "k"], token: Int32[np.ndarray, "k"]) -> Draws:
    """The draws with other tokens in some places, and what the target says of those."""
    changed = draws.take(range(len(draws.token)))
    changed.token[at] = token
    changed.logprob[at] = laws.logp[at, token]
    changed.kept_logmass[at], changed.entropy[at] = laws.kept_logmass[at], laws.entropy[at]
    return changed


def _laws(logits: Float[Tensor, "M V"], rows: Int64[np.ndarray, "R"], sampling: Sampling) -> Laws:
    """`process` for many rows; a row's bits do not depend on the others."""
    logits_RV = logits[torch.from_numpy(rows)].double().cpu().numpy()
    if truncates(sampling) or sampling.temperature == 0:
        each = [process(row, sampling) for row in logits_RV]
        return Laws(
            *(np.stack([getattr(one, name) for one in each]) for name in ("logp", "p", "kept_logmass", "entropy"))
        )
    x_RV = logits_RV / sampling.temperature
    shifted = x_RV - x_RV.max(1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(1, keepdims=True)
    p /= total
    logp = shifted - np.log(total)
    entropy = -(p * np.where(p > 0, logp, 0.0)).sum(1)
    return Laws(logp, p, np.zeros(len(rows)), entropy)


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
    return Verdict(tuple(path), Draws.join(draws), len(path))


def _drawn(target: Processed, token: int) -> Draws:
    return Draws(
        np.array([token], np.int32), *(np.array([value], np.float32) for value in (target.logp[token], target.kept_logmass, target.entropy))
    )  # fmt: skip
