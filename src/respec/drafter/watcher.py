"""Examples for nothing: what a head learns from, taken while the policy learner computes its own forward pass."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from respec.drafter.examples import Example, truncated
from respec.types import Batch, Sampling

Key = tuple[int, int, int]


class Seen(Protocol):
    """What was looked at, and how long that took."""

    @property
    def examples(self) -> Sequence[Example]: ...
    @property
    def wall_s(self) -> float: ...


class Watcher:
    """Looks on at one update of the policy learner, and keeps an example of each rollout that has a weight in `weight_of`.

    The policy that is seen is the one before the update, of counter `version`: it sampled these rollouts, while the one that will be
    drafted for next has taken one update more. So targets are one update old; `capture` after the update would give newer ones
    for a second forward pass. `top` is K of `Example`. Hidden states are kept in `stored` (a float64 policy's in float64). `wall_s`
    is the time that looking took.
    """

    def __init__(
        self,
        taps: Sequence[int],
        sampling: Sampling,
        weight_of: Mapping[Key, float],
        version: int,
        stored: torch.dtype = torch.bfloat16,
        top: int = 64,
    ) -> None:
        self.wall_s = 0.0
        self._taps, self._sampling, self._weight_of = tuple(taps), sampling, weight_of
        self._version, self._stored, self._top = version, stored, top
        self._laws: list[tuple[Tensor, Tensor]] = []
        self._found: dict[Key, Example] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers before which hidden states are wanted."""
        return self._taps

    @property
    def keys(self) -> tuple[Key, ...]:
        """The rollouts that are looked at."""
        return tuple(self._weight_of)

    @property
    def examples(self) -> list[Example]:
        """What was seen, in the order of the weights; rollouts without tokens are left out."""
        return [self._found[key] for key in self._weight_of if key in self._found]

    def laws(self, batch: Batch, part: slice, logp_cV: Float[Tensor, "c V"]) -> None:
        """Takes the most probable tokens of the rows that are wanted."""
        began = time.perf_counter()
        wanted = self._wanted(batch)[batch.sequence_C[part].cpu()]
        rows = logp_cV if wanted.all() else logp_cV[wanted.to(logp_cV.device)]
        self._laws.append(truncated(rows, self._sampling, self._top))
        self.wall_s += time.perf_counter() - began

    @torch.no_grad()
    def states(self, batch: Batch, tap_NE: tuple[Float[Tensor, "N E"], ...]) -> None:
        """Cuts the batch into examples, of copies."""
        began = time.perf_counter()
        stored = torch.float64 if tap_NE[0].dtype == torch.float64 else self._stored
        token_CK, p_CK = (torch.cat(parts) for parts in zip(*self._laws, strict=True))
        self._laws.clear()
        row, start_S = 0, batch.start_S.tolist()
        completion_S = torch.bincount(batch.sequence_C, minlength=len(batch.key_S)).tolist()
        for s in self._wanted(batch).nonzero().flatten().tolist():
            begin, end, count = start_S[s], start_S[s + 1], completion_S[s]
            if count:
                key = batch.key_S[s]
                self._found[key] = Example(
                    batch.token_N[begin:end].clone(),
                    torch.cat([tap[begin:end].to(stored) for tap in tap_NE], dim=1),
                    end - begin - count,
                    token_CK[row : row + count].int(),
                    p_CK[row : row + count].clone(),
                    self._weight_of[key],
                    self._version,
                )
            row += count
        self.wall_s += time.perf_counter() - began

    def _wanted(self, batch: Batch) -> Bool[Tensor, "S"]:
        return torch.tensor([key in self._weight_of for key in batch.key_S])
