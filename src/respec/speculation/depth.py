"""Depth by request: the longest request ends the rollout, so a token of it is worth more drafting than one of those that end before it.

DAS (arXiv 2511.13841) shares a budget of drafted nodes out by a law of diminishing returns fitted to the requests. Here every token has a
price instead, in seconds of the rest of the rollout, which needs no such law: where requests are expected to be equally long, prices are
equal and the depth for all is that of highest goodput; where nobody knows which is the longest, its price is split among those that may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from respec.speculation.acceptance import Outlook
from respec.speculation.cost_model import CostModel
from respec.types import Load


@dataclass(frozen=True)
class Chains:
    """What the chains of one drafter promise and cost, its depths rising. Made and read by the functions below and by `Sharing`."""

    drafter: str
    depths: tuple[int, ...]
    outlook: Outlook
    cost: CostModel

    def draft_s(
        self, drafting: float | np.ndarray, deepest: float | np.ndarray, total: float | np.ndarray
    ) -> float | np.ndarray:
        """Seconds of drafting: so many sequences, the deepest of them and all together so many tokens."""
        fixed, each, step, both = self.cost.drafting(self.drafter)
        return np.where(deepest, fixed + each * drafting + step * deepest + both * total, 0.0)


def token_seconds(chains: Chains, largest: int, context: float) -> Float[np.ndarray, "B+1"]:
    """C(b): seconds in which each of b = 0..largest sequences gets one token, at the best one depth for all (0: plain decoding).

    Looked at for powers of two, between them a line.
    """
    octave_O = np.unique(np.minimum(2 ** np.arange(largest.bit_length() + 1), largest))
    s_S = np.array([0, *chains.depths])
    b_OS, s_OS = (x.ravel().astype(float) for x in np.broadcast_arrays(octave_O[:, None], s_S[None]))
    index = s_OS.astype(int)
    seconds = chains.cost.forward(b_OS, b_OS * (1 + chains.outlook.nodes_S[index]), context)
    seconds = (seconds + chains.draft_s(b_OS, s_OS, b_OS * s_OS)) / chains.outlook.tokens_S[index]
    best_O = seconds.reshape(len(octave_O), len(s_S)).min(axis=1)
    return np.interp(np.arange(largest + 1), [0, *octave_O], [0.0, *best_O])


def prices(left_KB: Float[np.ndarray, "K B"], token_s: Float[np.ndarray, "B+1"]) -> Float[np.ndarray, "B"]:
    """Seconds by which the rest of the rollout gets shorter when a request gets one token more, from K draws of all remaining lengths.

    A request that b - 1 others outlive takes part in what b of them decode together up to its end: a token less of it takes C(b) - C(b - 1)
    from the rollout, which is all of C(1) for the last, little more than its rows for one that many outlive. How many outlive it is, for
    each of its own draws, the mean over all draws of the others. Prices sum to C(B).
    """
    many, batch = left_KB.shape
    # a request's own draws never tie, so that of requests with equal draws each outlives the others in turn
    ordered_KB = np.sort(left_KB, axis=0) + 1e-6 * np.arange(many)[:, None]
    pooled = np.sort(ordered_KB, axis=None)
    reached = np.searchsorted(pooled, ordered_KB, "left") + np.searchsorted(pooled, ordered_KB, "right")
    own_K = many - np.arange(many) - 0.5
    others_KB = np.maximum(many * batch - reached / 2 - own_K[:, None], 0.0) / many
    price_B = np.interp(others_KB, np.arange(batch), np.diff(token_s)).mean(axis=0)
    return price_B * (token_s[-1] / price_B.sum())


def depths(
    load: Load, uniform: int, price_B: Float[np.ndarray, "B"], chains: Chains
) -> tuple[Int[np.ndarray, "B"], float]:
    """How deep each active sequence drafts, at these prices; and what that saves of the whole rollout over depth `uniform` for all, as a
    share of this round's seconds.

    Depth d of a request is worth price · tokens(d), less its nodes; a step of the drafter is taken once for all who draft that deep. So up to
    every depth that may be the deepest each request has its own best, and the sum of these decides which it is.
    """
    tokens, nodes, b = chains.outlook.tokens_S, chains.outlook.nodes_S, float(load.active)
    _, each, _, both = chains.cost.drafting(chains.drafter)
    # a row more costs what it does on the way to the one depth for all
    more = b * (1 + float(nodes[max(uniform, 1)]))
    plain_s, more_s = chains.cost.forward(np.array([b, b]), np.array([b, more]), load.context)
    d = np.arange(chains.depths[-1] + 1)
    spent_S = nodes[d] * (more_s - plain_s) / (more - b) + both * d + each * (d > 0)
    room_B = np.maximum(np.array(load.remaining_B) - 1, 0)
    worth_BS = np.where(d <= room_B[:, None], price_B[:, None] * tokens[d] - spent_S, -np.inf)
    total_S = np.maximum.accumulate(worth_BS, axis=1).sum(axis=0) - chains.draft_s(0.0, d, 0.0)
    ends = np.array([0, *chains.depths])
    depth_B = np.argmax(worth_BS[:, : int(ends[np.argmax(total_S[ends])]) + 1], axis=1)
    round_s, whole_s = _seconds(chains, load, np.stack([depth_B, np.minimum(uniform, room_B)]), price_B)
    return depth_B, float((whole_s[1] - whole_s[0]) / round_s[1])


def _seconds(
    chains: Chains, load: Load, depth_AB: Int[np.ndarray, "A B"], price_B: Float[np.ndarray, "B"]
) -> tuple[Float[np.ndarray, "A"], Float[np.ndarray, "A"]]:
    """Of the round under each of A assignments, and of the round less what its tokens take from the rest of the rollout."""
    b = np.full(len(depth_AB), float(load.active))
    forward_s = chains.cost.forward(b, b + chains.outlook.nodes_S[depth_AB].sum(axis=1), load.context)
    round_s = forward_s + chains.draft_s((depth_AB > 0).sum(axis=1), depth_AB.max(axis=1), depth_AB.sum(axis=1))
    return round_s, round_s - chains.outlook.tokens_S[depth_AB] @ price_B
