"""What of a run's metrics a person must look at, one entry a kind, however often it came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from respec.report.echo import WINDOW, echo_trap
from respec.report.records import StepMetrics
from respec.report.surprise import Surprise, recorded

# A metric, when it alarms, and what to say then.
RULES = (
    ("drafter/alarms", lambda value: value > 0, "draft weights were refused at the door, or acceptance collapsed after a swap"),
    ("drafter/failed", lambda value: value > 0, "an update of the drafter was not finite, and was taken back"),
    ("rollout/tokens_identical", lambda value: value < 1, "speculation gave other tokens than plain decoding; run `respec certify`"),
    ("reward/fell_back", lambda value: value > 0, "a reward failed and its fallback value was used"),
)  # fmt: skip


class Alarms:
    """Takes a run's steps one by one. `entries`: what alarmed, `first` and `last` step, `count`, a `line` for a person."""

    def __init__(self, lossless: bool = True):
        self.entries: dict[str, dict[str, Any]] = {}
        self._lossless = lossless
        self._seen = Surprise()
        self._window: deque[Mapping[str, float]] = deque(maxlen=WINDOW + 1)

    def take(self, record: StepMetrics) -> None:
        metrics = record.metrics
        for name, alarming, line in RULES:
            if name in metrics and alarming(metrics[name]):
                self._add(name, record.step, line)
        before, self._seen = self._seen, self._seen + recorded(metrics)
        if self._lossless:
            for line in self._seen.news(before):
                self._add("surprise", record.step, line)
        if record.step:
            self._window.append(metrics)
            for line in echo_trap(list(self._window)):
                self._add("echo", record.step, line)

    def _add(self, kind: str, step: int, line: str) -> None:
        entry = self.entries.setdefault(kind, {"first": step, "count": 0})
        entry |= {"last": step, "line": line, "count": entry["count"] + 1}


def alarms_of(steps: Iterable[StepMetrics], lossless: bool) -> list[dict[str, Any]]:
    """Those of all `steps`. `lossless`: whether tokens are promised to be the policy's own draws."""
    alarms = Alarms(lossless)
    for record in steps:
        alarms.take(record)
    return list(alarms.entries.values())
