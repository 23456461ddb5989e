"""All runs of the live page, behind one lock, and their answers as JSON."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from respec.errors import RunDirError
from respec.report.dash.find import find
from respec.report.dash.followed import Followed, meaning_of

# Folders are searched no more often.
SEARCH_S = 5.0
# Runs whose steps are held in memory: those opened or compared last.
OPENED = 12
# Runs, and metrics, of one comparison.
MOST_COMPARED = 12
MOST_METRICS = 12


class Runs:
    """Answers for several threads. Every answer is bounded, however long the runs are."""

    def __init__(self, roots: Sequence[Path]):
        self._roots = roots
        self._lock = threading.Lock()
        self._runs: dict[str, Followed] = {}
        self._searched = -math.inf
        self._opened: OrderedDict[str, Followed] = OrderedDict()
        self._reports: dict[str, tuple[Any, bytes]] = {}

    def rows(self) -> bytes:
        """A row for each run; of one that cannot be read, why."""
        with self._lock:
            self._search()
            rows = [_row(run) for run in self._runs.values()]
        return _json({"rows": rows, "roots": [str(root) for root in self._roots], "compared": MOST_COMPARED})

    def report(self, key: str) -> bytes | None:
        """What the page of run `key` shows; None for no such run. Raises RunDirError or OSError for one that cannot be read."""
        with self._lock:
            run = self._find(key)
            if run is None:
                return None
            run.refresh()
            stamp, known = run.stamp(), self._reports.get(key)
            if known is None or known[0] != stamp:
                self._open(run)
                known = stamp, _json(run.report())
                self._reports[key] = known
            return known[1]

    def compare(self, keys: Sequence[str], names: Sequence[str]) -> bytes:
        """Lines of those metrics for those runs, and the settings in which they differ."""
        with self._lock:
            asked = [run for key in dict.fromkeys(keys) if (run := self._find(key)) is not None][:MOST_COMPARED]
            wanted, lines, runs = list(dict.fromkeys(names))[:MOST_METRICS], [], []
            for run in asked:
                try:
                    self._open(run)
                    lines.append(run.lines(wanted))
                    runs.append(run)
                except (RunDirError, OSError) as error:
                    lines.append({"key": run.key, "error": str(error), "lines": {}, "names": []})
            known = sorted({name for line in lines for name in line["names"]})
            meanings = {name: meaning_of(name) for name in known}
            return _json({"runs": lines, "differing": differing(runs), "meaning": meanings})

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return self._find(key) is not None

    def _find(self, key: str) -> Followed | None:
        if key not in self._runs:
            self._search()
        return self._runs.get(key)

    def _search(self) -> None:
        if time.monotonic() - self._searched < SEARCH_S:
            return
        found = find(self._roots)
        self._runs = {
            key: self._runs[key] if key in self._runs and self._runs[key].path == path else Followed(key, path)
            for key, path in found.items()
        }
        for key in [key for key, run in self._opened.items() if self._runs.get(key) is not run]:
            self._forget(key)
        self._searched = time.monotonic()

    def _open(self, run: Followed) -> None:
        self._opened[run.key] = run
        self._opened.move_to_end(run.key)
        while len(self._opened) > OPENED:
            self._forget(next(iter(self._opened)))

    def _forget(self, key: str) -> None:
        self._opened.pop(key).close()
        self._reports.pop(key, None)


def differing(runs: Sequence[Followed]) -> list[dict[str, Any]]:
    """The settings that are not the same in all `runs`, but for the folder, as text, in the order of `runs`."""
    keys = sorted({key for run in runs for key in run.settings} - {"run.dir"})
    rows = [{"setting": key, "value": [_text(run.settings.get(key)) for run in runs]} for key in keys]
    return [row for row in rows if len(set(row["value"])) > 1]


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _row(run: Followed) -> dict[str, Any]:
    try:
        return run.row()
    except (RunDirError, OSError) as error:
        return {
            "key": run.key,
            "state": "unreadable",
            "detail": str(error),
            "step": 0,
            "steps": 0,
            "changed": 0,
            "alarms": 0,
        }


def _json(tree: Any) -> bytes:
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
