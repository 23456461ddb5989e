"""The last word against speculation that does not pay: what was measured, against what plain decoding is predicted to have taken."""

from __future__ import annotations

import math


class Guard:
    """Watches the time that rounds of the running drafter took beside the time that plain decoding would have taken for their tokens.

    Means fade over four dwells. A drafter slower than plain decoding for more than a dwell on end is barred, for `bar` rounds,
    twice as long each time again, until a probe finds it faster. Chance does not bar it: the mean must lie below by two standard errors.
    """

    def __init__(self, dwell: int, bar: int) -> None:
        self._dwell = dwell
        self._bar = bar
        self._keep = math.exp(-1.0 / (4 * dwell))
        self._drafter = ""
        self._seconds = self._plain = self._square = self._weight = 0.0
        self._below = self._round = 0
        self._until: dict[str, int] = {}
        self._times: dict[str, int] = {}

    def observe(self, drafter: str, seconds: float, plain_s: float, probe: bool) -> bool:
        """One round: it took `seconds`, plain decoding would have taken `plain_s`. True when this bars the drafter."""
        self._round += 1
        if probe:
            return False
        if drafter != self._drafter:
            self._drafter = drafter
            self._seconds = self._plain = self._square = self._weight = 0.0
            self._below = 0
        if drafter == "off":
            return False
        self._seconds = self._keep * self._seconds + seconds
        self._plain = self._keep * self._plain + plain_s
        self._square = self._keep * self._square + (plain_s - seconds) ** 2
        self._weight = self._keep * self._weight + 1.0
        slower = self._seconds - self._plain > 2 * math.sqrt(self._square)
        self._below = self._below + 1 if slower else 0
        if self._below <= self._dwell:
            return False
        self._times[drafter] = self._times.get(drafter, 0) + 1
        self._until[drafter] = self._round + self._bar * 2 ** min(self._times[drafter] - 1, 6)
        return True

    def bars(self, drafter: str) -> bool:
        return self._round < self._until.get(drafter, 0)

    def reason(self, name: str) -> str:
        """What happened, for a person."""
        return (
            f"guard: {name} took {self._seconds:.3g} s where plain decoding would have taken {self._plain:.3g} s, "
            f"for more than {self._dwell} rounds; it is off"
        )
