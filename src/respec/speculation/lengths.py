"""How long requests will still be: what their rows answered before, else what all did, of those that were longer than they are already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from respec.types import Load, Rollout, Stream

# So many answers of a row are kept, the latest ones, and so many of the run: the policy moves on.
KEPT, RUN = 32, 512
# How many answers' weight the run's lengths have beside a row's own.
STRENGTH = 1.0


class Lengths:
    """Remembers how many tokens completions had, by dataset row.

    It learns from whole rollouts only: of a group still running those that end first are the short ones, and say little of the others.
    """

    def __init__(self) -> None:
        self._row: dict[int, tuple[int, ...]] = {}
        self._latest: list[int] = []
        self._all_N = np.zeros(0, np.int64)
        self._asked: tuple[int, ...] = ()
        self._mine_BR = np.zeros((0, KEPT), np.int64)

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return bool(self._latest)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """A rollout has ended; these are all of its completions. Evaluations, sampled in their own way, tell nothing."""
        for rollout in rollouts:
            if rollout.stream == Stream.EVAL:
                continue
            tokens, row = len(rollout.token_T), rollout.prompt.row
            self._row[row] = (tokens, *self._row.get(row, (0,) * KEPT)[:-1])
            self._latest.append(tokens)
        self._latest = self._latest[-RUN:]
        self._all_N = np.sort(np.array(self._latest, np.int64))
        self._asked = ()

    def draws(self, load: Load, chance_KB: Float[np.ndarray, "K B"]) -> Float[np.ndarray, "K B"]:
        """K draws of the tokens that each active sequence has still to come, from numbers in [0, 1); see `left`."""
        if load.row_B != self._asked:
            nothing = (0,) * KEPT
            self._mine_BR = np.sort(np.array([self._row.get(row, nothing) for row in load.row_B]), axis=1)
            self._asked = load.row_B
        return left(self._mine_BR, self._all_N, np.array(load.drawn_B), np.array(load.remaining_B), chance_KB)


def left(
    mine_BR: Int[np.ndarray, "B R"],
    all_N: Int[np.ndarray, "N"],
    drawn_B: Int[np.ndarray, "B"],
    remaining_B: Int[np.ndarray, "B"],
    chance_KB: Float[np.ndarray, "K B"],
) -> Float[np.ndarray, "K B"]:
    """Draws of the remaining length: `chance_KB` says which of the lengths that are still possible.

    The law of a request's length is the posterior mean of a Dirichlet process (Ferguson 1973) whose base is the run's: its row's own answers
    `mine_BR` (0 where there is none) weigh one each, all of the run `all_N` STRENGTH together; both ascending, `all_N` not empty. Of these
    count those longer than what it has drawn already. One that has outlived all of them is expected to go on for as long again, as under a
    Pareto law of index two. Never more than the budget that remains.
    """
    each, kept = np.arange(len(drawn_B)), mine_BR.shape[1]
    own_B = (mine_BR > drawn_B[:, None]).sum(axis=1)
    first_B = np.searchsorted(all_N, drawn_B, side="right")
    longer_B = len(all_N) - first_B
    base_B = STRENGTH * longer_B / len(all_N)
    place_KB = chance_KB * (own_B + base_B)
    # the row's own that are still possible are the last ones
    own_KB = mine_BR[each, np.minimum(kept - own_B + place_KB.astype(np.int64), kept - 1)]
    share_KB = np.maximum(place_KB - own_B, 0.0) / np.maximum(base_B, 1e-9)
    run_KB = all_N[np.minimum(first_B + (share_KB * longer_B).astype(np.int64), len(all_N) - 1)]
    total_KB = np.where(place_KB < own_B, own_KB, run_KB)
    total_KB = np.where(own_B + longer_B > 0, total_KB, 2 * np.maximum(drawn_B, 1))
    return np.clip(total_KB - drawn_B, 1, np.maximum(remaining_B, 1)).astype(float)
