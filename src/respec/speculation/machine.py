"""The machine's own speed: how many times longer all rounds take than when the costs were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

# What another program on the machine does to every plan alike; no plan is mistaken by so much. Less is left to what corrects them one by one.
SHIFT = math.log(4.0)
# So many rounds on end must be off to the same side: one alone is a hiccup.
ON_END = 3


class MachineSpeed:
    """`factor` multiplies predicted seconds of every plan. It jumps when rounds on end are far off, and says nothing of which plan is best.

    A laptop whose cores are taken decodes at a tenth of its rate, or was profiled then: no correction of single plans reaches that far.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._off: list[float] = []

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def observe(self, seconds: float, predicted_s: float) -> None:
        """A round took `seconds`; `predicted_s` is without this factor."""
        off = math.log(seconds / predicted_s) - self._log
        if abs(off) < SHIFT or (self._off and (off > 0) != (self._off[0] > 0)):
            self._off = []
        if abs(off) >= SHIFT:
            self._off.append(off)
        if len(self._off) >= ON_END:
            self._log += statistics.median(self._off)
            self._off = []

    def state(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        return {"log": self._log, "off": self._off}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` gave."""
        self._log, self._off = state["log"], list(state["off"])
