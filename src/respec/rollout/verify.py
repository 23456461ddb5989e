"""Verification of drafts against the target's own draws, in `matching` mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32


def accepted_prefix(draft: Sequence[int], drawn: Int32[np.ndarray, "n+1"]) -> int:
    """How many drafted tokens stand: the walk goes on while the draft carries the token that the target drew.

    `drawn[i]` is the target's draw at the position of draft token i, made with that position's key; one more follows. The
    output is drawn[:accepted + 1], which is plain decoding's output by construction (Daliri et al. 2024, arXiv 2408.07978).
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == drawn[accepted]:
        accepted += 1
    return accepted
