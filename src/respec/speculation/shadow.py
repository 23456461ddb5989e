"""Shadow evidence: what a step's finished rollouts say about drafters that did not run in it, so that turning one on is no leap in the dark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from respec.speculation.acceptance import Acceptance
from respec.types import DraftCounts, RoundRecord

# A drafter that has drafted for so many sequences in a step is known. They tell 0.5 from 0.6; a step of use has thousands.
WANTED = 200.0


def wanting(rounds: Sequence[RoundRecord], drafters: Sequence[str]) -> dict[str, float]:
    """Of these drafters, how many sequences' worth of evidence each is short of after a step of these rounds; those that are short only."""
    drafted = {name: sum(r.active for r in rounds if r.plan.n and r.plan.drafter == name) for name in drafters}
    return {name: WANTED - count for name, count in drafted.items() if count < WANTED}


def replayed(
    acceptance: Acceptance,
    wanted: Mapping[str, float],
    replays: Mapping[str, Callable[[Callable[[], bool]], DraftCounts]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Takes in replays by those drafters of which evidence is wanted, in equal shares of `seconds`. A replay ends when what it is given
    says so."""
    names = [name for name in replays if name in wanted]
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        began = clock()
        until = began + seconds / left
        seen = replays[name](lambda until=until: clock() >= until)
        seconds -= clock() - began
        if seen.asked_D and seen.asked_D[0]:
            weight = min(1.0, wanted[name] / seen.asked_D[0])
            acceptance.observe_shadow(
                name, seen.tested_D, seen.accepted_D, weight, 1, seen.asked_D, seen.drafted_D, seen.parents_D
            )


def overlapped(
    acceptance: Acceptance, wanted: Mapping[str, float], name: str, tested_K: Sequence[float], stood_K: Sequence[float]
) -> None:
    """Takes in, where evidence is wanted, how far the laws of a drafter that has some agree with the target's on fresh rollouts."""
    if name in wanted and tested_K and tested_K[0]:
        acceptance.observe_shadow(name, tested_K, stood_K, min(1.0, wanted[name] / tested_K[0]))
