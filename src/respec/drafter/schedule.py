"""When a head learns, and how fast: the learning rate's way through a run, and a gate that opens when the policy has moved away."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float64

from respec.drafter.judge import Judgement

# A band of fewer tokens says nothing of its own.
FEW = 8


def rate(step: int, steps: int, peak: float, warmup: int, decay: str, floor: float) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear up to `peak` over `warmup` steps, then `decay`.

    decay: `constant`, or `linear` / `cosine` from `peak` down towards `peak * floor`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    gone = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1.0 - gone if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return peak * (floor + (1.0 - floor) * left)


class Gate:
    """Says how far a head has fallen behind its best, beyond what the policy's entropy explains, and whether that calls for an update.

    A flatter policy is harder to draft for, by any head. So the best judgement's overlaps, band of entropy by band, are weighed with the
    bands' shares in the rollouts at hand (direct standardisation): what the best would have scored on these. `margin` 0: always open.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._best: tuple[Float64[np.ndarray, "E"], Float64[np.ndarray, "E"]] | None = None

    def drift(self, seen: Judgement) -> float:
        """The overlap that is missing on these rollouts, 0 at the first; where none is, this is the best from now on."""
        missing = 0.0
        if self._best is not None:
            count_E, overlap_E = self._best
            whole = (count_E * overlap_E).sum() / max(1.0, count_E.sum())
            expected = (seen.count_E * np.where(count_E >= FEW, overlap_E, whole)).sum()
            missing = float(expected - (seen.count_E * seen.overlap_E).sum()) / max(1.0, float(seen.count_E.sum()))
        if self._best is None or missing < 0:
            self._best = (seen.count_E, seen.overlap_E)
        return missing

    def opens(self, drift: float) -> bool:
        return not self._margin or drift > self._margin

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat, for safetensors; nothing before the first judgement."""
        return {} if self._best is None else {"best": torch.from_numpy(np.stack(self._best))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes up a saved state."""
        self._best = (state["best"][0].numpy(), state["best"][1].numpy()) if state else None
