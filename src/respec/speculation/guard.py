"""The last word against speculation that does not pay: what was measured, against what plain decoding is predicted to have taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# A drafter is barred for so many dwells: long enough to measure plain decoding, which may have become slow itself.
BAR = 4
# Bars double when they come again within so many times their length.
AGAIN = 10


class Guard:
    """Watches the time that rounds of the running drafter took beside the time that plain decoding would have taken for their tokens.

    Means fade over two dwells. A drafter slower than plain decoding for more than a dwell on end is barred from all but probes. Chance
    does not bar it: the mean must lie below by two standard errors.
    """

    def __init__(self, dwell: int) -> None:
        self._dwell = dwell
        self._keep = math.exp(-1.0 / (2 * dwell))
        self._round = 0
        self._bars: dict[str, tuple[int, int]] = {}
        self._shut: dict[str, str] = {}
        self._watch("")

    def observe(self, drafter: str, seconds: float, plain_s: float, probe: bool) -> bool:
        """One round: it took `seconds`, plain decoding would have taken `plain_s`. True when this bars the drafter."""
        self._round += 1
        if probe:
            return False
        if drafter != self._drafter:
            self._watch(drafter)
        if drafter == "off":
            return False
        self._seconds = self._keep * self._seconds + seconds
        self._plain = self._keep * self._plain + plain_s
        self._square = self._keep * self._square + (plain_s - seconds) ** 2
        slower = self._seconds - self._plain > 2 * math.sqrt(self._square)
        self._below = self._below + 1 if slower else 0
        if self._below <= self._dwell:
            return False
        until, length = self._bars.get(drafter, (-math.inf, 0))
        again = length and self._round < until + AGAIN * length
        length = 2 * length if again else BAR * self._dwell
        self._bars[drafter] = self._round + length, length
        return True

    def shut(self, drafter: str, reason: str) -> None:
        """Bars a drafter from probes too, until it is opened: its drafts are known to be wrong."""
        self._shut[drafter] = reason

    def open(self, drafter: str) -> None:
        self._shut.pop(drafter, None)

    def shuts(self, drafter: str) -> bool:
        return drafter in self._shut

    def bars(self, drafter: str) -> bool:
        return self.shuts(drafter) or (drafter in self._bars and self._round < self._bars[drafter][0])

    def reason(self, drafter: str, name: str) -> str:
        """What happened, for a person; `name` is that of the plan."""
        return self._shut.get(drafter) or (
            f"guard: {name} lately took {self._seconds:.3g} s where plain decoding would have taken {self._plain:.3g} s, "
            f"for more than {self._dwell} rounds; it is off"
        )

    def state(self) -> dict[str, Any]:
        """Who is barred until when, as plain values. Who was being watched is not kept: watching begins anew."""
        return {"round": self._round, "bars": {name: list(bar) for name, bar in self._bars.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` gave."""
        self._round = state["round"]
        self._bars = {name: (until, length) for name, (until, length) in state["bars"].items()}

    def _watch(self, drafter: str) -> None:
        self._drafter = drafter
        self._seconds = self._plain = self._square = 0.0
        self._below = 0
