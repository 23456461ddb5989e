"""One run as the live page follows it: its state, the figures of its row, and, once it was opened, its steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from respec.errors import RunDirError
from respec.report import lock
from respec.report.alarms import Alarms
from respec.report.metrics import metric
from respec.report.page_data import collect, thinned
from respec.report.panel import ASIDE
from respec.report.records import METRICS_FILE, StepMetrics, read_metrics
from respec.report.run_dir import CONFIG_FILE, SUMMARY_FILE, flat
from respec.report.said import SAID_FILE, read_said
from respec.report.tail import Tail

# A run on another machine is taken to go on while its metrics are no older.
ELSEWHERE_S = 900.0
# Points of a line, of an opened run and of one that is compared.
POINTS = 2000
COMPARED_POINTS = 1000
# What a row shows, and the metric it is.
SHOWN = {
    "reward": "reward/mean",
    "accuracy": "eval/accuracy",
    "tokens_per_s": "rollout/tokens_per_s",
    "accepted_length": "rollout/accepted_length",
}


class Followed:
    """Reads no more of metrics.jsonl than what was added since it was last asked. Not for two threads at once."""

    def __init__(self, key: str, path: Path):
        self.key, self.path = key, path
        self.settings: dict[str, Any] = {}
        self._read_settings = 0
        self._steps: list[StepMetrics] | None = None
        self._begin_anew()
        self._tail = Tail(path)

    def _begin_anew(self) -> None:
        self._alarms = Alarms(self.settings.get("speculation.mode") != "lossy")
        self._last: dict[str, float] = {}
        self._step, self._time = 0, 0.0
        self._accuracy: list[float] = []
        self._speedups: list[float] = []
        if self._steps is not None:
            self._steps = []

    def refresh(self) -> None:
        """Raises RunDirError or OSError for a run that cannot be read."""
        self._settle()
        anew, new = self._tail.read()
        if anew:
            self._begin_anew()
        for record in new:
            self._take(record)
        if self._steps is not None:
            self._steps += new

    def row(self) -> dict[str, Any]:
        """The run's line in the list. Raises RunDirError or OSError."""
        self.refresh()
        planned = int(self.settings.get("run.steps", 0))
        state, detail = self._state(planned)
        figures = {name: self._last.get(metric) for name, metric in SHOWN.items()}
        return {
            "key": self.key,
            "state": state,
            "detail": detail,
            "step": self._step,
            "steps": planned,
            "changed": self._time or self._read_settings / 1e9,
            "accuracy_first": self._accuracy[0] if self._accuracy else None,
            "speedup": statistics.median(self._speedups) if self._speedups else None,
            "alarms": len(self._alarms.entries),
            **figures,
        }

    def report(self) -> dict[str, Any]:
        """What the report's page shows, and the state. Raises RunDirError or OSError."""
        row, steps = self.row(), self._opened()
        known = {"key": self.key, "state": row["state"], "detail": row["detail"]}
        return collect(self.path, steps, list(self._alarms.entries.values()), POINTS) | known

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Those metrics over steps and over hours of training, and the names of all there are. Raises RunDirError or OSError."""
        self.refresh()
        steps, hours, clock = self._opened(), [], 0.0
        for record in steps:
            clock += _training_s(record) / 3600
            hours.append(clock)
        lines = {}
        for name in names:
            values = [record.metrics.get(name, math.nan) for record in steps]
            there = [i for i, value in enumerate(values) if math.isfinite(value)]
            kept = [there[i] for i in thinned([values[i] for i in there], COMPARED_POINTS)]
            lines[name] = {
                "step": [steps[i].step for i in kept],
                "hours": [round(hours[i], 6) for i in kept],
                "value": [values[i] for i in kept],
            }
        return {"key": self.key, "lines": lines, "names": sorted(self._last)}

    def stamp(self) -> tuple[Any, ...]:
        """Changes when the run's report would."""
        files = (METRICS_FILE, SUMMARY_FILE, SAID_FILE, CONFIG_FILE)
        return (*(_written(self.path / name) for name in files), self._state(int(self.settings.get("run.steps", 0))))

    def close(self) -> None:
        """Forgets the steps, which are many; what the row needs stays."""
        self._steps = None

    def _opened(self) -> list[StepMetrics]:
        if self._steps is None:
            self._steps = [record for record in read_metrics(self.path) if record.step <= self._step]
        return self._steps

    def _settle(self) -> None:
        stat = (self.path / CONFIG_FILE).stat()
        if stat.st_mtime_ns == self._read_settings:
            return
        try:
            self.settings = flat(tomllib.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunDirError(f"'{self.path / CONFIG_FILE}' cannot be read: {error}") from None
        self._read_settings = stat.st_mtime_ns

    def _take(self, record: StepMetrics) -> None:
        finite = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        self._alarms.take(record)
        self._last |= finite
        self._step, self._time = record.step, record.time
        for name, values in (("eval/accuracy", self._accuracy), ("rollout/speedup", self._speedups)):
            if name in finite:
                values.append(finite[name])

    def _state(self, planned: int) -> tuple[str, str]:
        """Running, finished, stopped or failed; and what more is to be said of it."""
        standing, host = lock.standing(self.path)
        if standing == "held":
            return "running", ""
        if standing == "elsewhere":
            quiet = time.time() - self._time
            return ("running", f"on {host}") if quiet < ELSEWHERE_S else ("stopped", f"nothing was heard from {host}")
        if standing == "dead":
            return "failed", "its process ended without closing the folder"
        if self._step >= planned and _finished(self.path / SUMMARY_FILE):
            return "finished", ""
        said = read_said(self.path)
        failed = bool(said) and said[-1]["kind"] == "failed"
        return ("failed", said[-1]["line"][:300]) if failed else ("stopped", "")


def meaning_of(name: str) -> str:
    """A metric's line for a person; its name, where a run of another version wrote it."""
    try:
        entry = metric(name)
    except KeyError:
        return name
    return f"{entry.meaning}; {entry.reduction}; in {entry.unit}"


def _training_s(record: StepMetrics) -> float:
    """Seconds of a step, without what was measured beside it; step 0 is a measurement."""
    whole = record.metrics.get("time/step_s", 0.0) if record.step else 0.0
    aside = sum(record.metrics.get(name, 0.0) for name in ASIDE)
    seconds = whole - aside
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _written(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        return stat.st_mtime_ns, stat.st_size
    return 0, 0


def _finished(summary: Path) -> bool:
    try:
        return bool(json.loads(summary.read_text(encoding="utf-8")).get("finished", True))
    except (OSError, ValueError, AttributeError):
        return False
