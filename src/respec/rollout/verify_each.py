"""Verification of a batch whose requests are not all sampled alike: those that are, are judged together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.rollout.lenient import Lenience
from respec.rollout.tree import DraftTree, FlatTrees
from respec.rollout.verify import Verdict, verify
from respec.types import Mode, Sampling


def verify_each(
    trees: Sequence[DraftTree],
    flat: FlatTrees,
    logits: Float[Tensor, "M V"],
    mode: Mode,
    sampling_B: Sequence[Sampling],
    lenience: Lenience | None = None,
) -> list[Verdict]:
    """`verify`, each request under its own settings. A row's draw depends on no other row, so none depends on who is judged with whom."""
    if all(its is sampling_B[0] for its in sampling_B):
        return verify(trees, flat, logits, mode, sampling_B[0], lenience)
    found: dict[int, Verdict] = {}
    for sampling in dict.fromkeys(sampling_B):
        members = [b for b, its in enumerate(sampling_B) if its == sampling]
        part, rows = _part(flat, trees, members)
        verdicts = verify([trees[b] for b in members], part, logits[rows], mode, sampling, lenience)
        found.update(zip(members, verdicts, strict=True))
    return [found[b] for b in range(len(trees))]


def _part(flat: FlatTrees, trees: Sequence[DraftTree], members: Sequence[int]) -> tuple[FlatTrees, Tensor]:
    """Some requests' rows of a pass, end to end, and which they are; `branches`, which only the pass itself reads, stays behind."""
    counts = [len(trees[b].token_n) + 1 for b in members]
    rows = np.concatenate([flat.start_B[b] + np.arange(n) for b, n in zip(members, counts, strict=True)])
    taken = (getattr(flat, name)[rows] for name in ("token_M", "slot_M", "position_M", "index_M", "key_M"))
    return FlatTrees(*taken, start_B=np.cumsum(counts) - counts, branches=None), torch.from_numpy(rows)
