"""What a rollout did, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from respec.rollout.request import Request
from respec.rollout.target import Target
from respec.types import RolloutStats, RoundRecord


def reaching(depth_B: Sequence[int]) -> tuple[int, ...]:
    """How many of the depths are at least 1, 2, ..."""
    depths = np.array(depth_B)
    return tuple(int((depths >= d).sum()) for d in range(1, int(depths.max(initial=0)) + 1))


def stats_of(
    done: Iterable[Request], target: Target | None, records: Sequence[RoundRecord], wall_s: float
) -> RolloutStats:
    return RolloutStats(
        wall_s=wall_s,
        prefill_s=target.prefill_s if target else 0.0,
        draft_s=sum(record.draft_s for record in records),
        verify_s=sum(record.verify_s for record in records),
        overhead_s=sum(record.overhead_s for record in records),
        prompt_tokens=target.prompt_tokens if target else 0,
        tokens=sum(request.drawn for request in done),
        drafted=sum(record.drafted for record in records),
        accepted=sum(record.accepted for record in records),
        sequence_rounds=sum(record.active for record in records),
        round_R=tuple(records),
    )
