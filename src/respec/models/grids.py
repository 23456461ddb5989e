"""How packed sequences are laid out for attention: in grids of neighbouring lengths, so that little is padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int


@dataclass(frozen=True)
class Grid:
    """A run of neighbouring sequences, `tokens` in all, padded to [sequences, longest].

    `padded_N` is the cell of each token of the run, counted within the grid; `flat_SL` the token of each cell, counted within
    the run, where padding repeats the sequence's last.
    """

    padded_N: Int[torch.Tensor, "N"]
    flat_SL: Int[torch.Tensor, "S*L"]
    sequences: int
    longest: int
    tokens: int


Layout = tuple[Grid, ...]
"""The grids of a flat row, one after the other; made once a forward pass, read by every layer."""

# One grid for all would let a single long sequence among short ones cost its square for each of them.
MOST_CELLS_PER_TOKEN = 2


def layout(start_S: Int[torch.Tensor, "S+1"]) -> Layout:
    """Grids for sequences that begin at `start_S[:-1]` and end before `start_S[1:]` (token indices).

    A grid takes in sequences, in their order, until it would have more than `MOST_CELLS_PER_TOKEN` cells for each token.
    Sequences sorted by length, as `policy.pack` lays them, give the fewest grids.
    """
    length_S = start_S.diff().tolist()
    runs: list[list[int]] = []
    for length in length_S:
        wider = [*runs[-1], length] if runs else []
        if not runs or len(wider) * max(wider) > MOST_CELLS_PER_TOKEN * sum(wider):
            runs.append([length])
        else:
            runs[-1].append(length)
    return tuple(_grid(run, start_S.device) for run in runs)


def _grid(lengths: list[int], device: torch.device) -> Grid:
    length_S = torch.tensor(lengths)
    longest = max(lengths)
    column_L = torch.arange(longest)
    flat_SL = (length_S.cumsum(0) - length_S)[:, None] + torch.minimum(column_L[None], length_S[:, None] - 1)
    padded_N = (column_L[None] < length_S[:, None]).flatten().nonzero().flatten()
    return Grid(padded_N.to(device), flat_SL.flatten().to(device), len(lengths), longest, sum(lengths))
