"""Replays finished rollouts as a look-up drafter would have drafted them: what an idle drafter is worth, without running the model.

A look-up's draft is a function of tokens alone, and in `matching` the tokens are the same whoever drafts. So the counts are those that decoding
with this drafter would have given, all samples of a group side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.request import Request
from respec.types import Ask, Plan, Rollout

LookUp = NgramDrafter | SuffixDrafter | PreviousDrafter


@dataclass(frozen=True)
class Replayed:
    """Counts of sequences and rounds by depth. Made by `replay`, read by an acceptance estimate.

    At depth d: asked to draft (the text goes that far), drafted; on the accepted path: could have gone on to d, had a node there, had it accepted.
    """

    asked_D: tuple[int, ...]
    drafted_D: tuple[int, ...]
    parents_D: tuple[int, ...]
    tested_D: tuple[int, ...]
    accepted_D: tuple[int, ...]

    @staticmethod
    def of(counts: Int[np.ndarray, "5 D"]) -> Replayed:
        return Replayed(*(tuple(row) for row in counts.tolist()))


def counted(counts: Int[np.ndarray, "5 D"], limit: int, deep: int, stood: int) -> None:
    """Adds a sequence that could go `limit` deep, was drafted `deep` for, and agreed with the first `stood` tokens."""
    for row, upto in enumerate((limit, deep, min(stood + 1, limit), min(stood + 1, deep), stood)):
        counts[row, :upto] += 1


def replay(drafter: LookUp, groups: Sequence[Sequence[Rollout]], depth: int, enough: Callable[[], bool]) -> Replayed:
    """Chains of `depth` over the rollouts of these groups, one group after the other, until `enough` says so before a round.

    The drafter must not have learned the rollouts yet, and have nothing in play; it is left so.
    """
    counts = np.zeros((5, depth), np.int64)
    for group in groups:
        _replay_group(drafter, group, Plan(drafter.name, depth, 1, depth), counts, enough)
    drafter.drop()
    return Replayed.of(counts)


def _replay_group(
    drafter: LookUp, group: Sequence[Rollout], plan: Plan, counts: np.ndarray, enough: Callable[[], bool]
) -> None:
    playing = [(_beginning(r, len(group)), r.token_T.tolist(), _turn_ends(r), r.truncated) for r in group]
    while playing and not enough():
        # a draft that reaches the length limit leaves the last place to the target's own token, as in decoding
        limits = [
            min(
                plan.s,
                ends[len(request.tokens)] - len(request.tokens) - (cut and ends[len(request.tokens)] == len(text)),
            )
            for request, text, ends, cut in playing
        ]
        trees = drafter.propose([request for request, *_ in playing], plan, limits, None)
        for (request, text, ends, _), limit, tree in zip(playing, limits, trees, strict=True):
            ahead = text[len(request.tokens) : ends[len(request.tokens)]]
            stood = common(tree.token_n, ahead)
            counted(counts, limit, len(tree.token_n), stood)
            request.tokens += ahead[: stood + 1]
            if stood + 1 >= len(ahead):
                # what an environment says is given, not drawn
                while len(request.tokens) < len(text) and not ends[len(request.tokens)]:
                    request.tokens.append(text[len(request.tokens)])
                if len(request.tokens) == len(text):
                    drafter.finish(request)
        playing = [player for player in playing if len(player[0].tokens) < len(player[1])]


def _turn_ends(rollout: Rollout) -> list[int]:
    """For every token where its turn ends, one past its last token; 0 for what an environment said."""
    drawn, ends = rollout.drawn_T.tolist(), [0] * len(rollout.token_T)
    end = len(ends)
    for place in reversed(range(len(ends))):
        if drawn[place]:
            ends[place] = end
        else:
            end = place
    return ends


def _beginning(rollout: Rollout, group: int) -> Request:
    """The rollout's request before its first token."""
    ask = Ask(rollout.prompt, rollout.stream, rollout.draw, group)
    return Request(ask, rollout.sample, np.zeros(1, np.uint64), order=0)


def common(draft: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(draft), len(text)) and draft[length] == text[length]:
        length += 1
    return length
