"""What a run said, kept in its folder: said.jsonl, one line each of when, what kind, and the words.

Kinds: `started`, each time the run is begun or gone on with; `said`; `failed`, the error that ended it. It is a log: what is generated again after a
resume is said again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from respec.errors import RespecError
from respec.report.live import View

SAID_FILE = "said.jsonl"
# What is read of a log that has grown long.
TAIL_BYTES = 64 * 1024


@contextlib.contextmanager
def keeping(run_dir: Path, view: View) -> Iterator[View]:
    """A view that shows what `view` does and keeps what is said, and the error that ends the run, if one does."""
    _keep(run_dir, "started", "")
    try:
        yield _Keeping(run_dir, view)
    except Exception as error:
        kind = "" if isinstance(error, RespecError) else f"{type(error).__name__}: "
        _keep(run_dir, "failed", f"{kind}{error}")
        raise


def read_said(run_dir: Path) -> list[dict[str, Any]]:
    """The last of what was said, oldest first; lines that are damaged are left out."""
    try:
        with (run_dir / SAID_FILE).open("rb") as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    except OSError:
        return []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            tree = json.loads(line)
            entries.append({"time": float(tree["time"]), "kind": str(tree["kind"]), "line": str(tree["line"])})
    return entries


def _keep(run_dir: Path, kind: str, line: str) -> None:
    """Appends; a full disk is no reason for a run to end here."""
    entry = json.dumps({"time": round(time.time(), 3), "kind": kind, "line": line})
    with contextlib.suppress(OSError), (run_dir / SAID_FILE).open("a", encoding="utf-8") as file:
        file.write(entry + "\n")


class _Keeping:
    def __init__(self, run_dir: Path, view: View):
        self._run_dir, self._view = run_dir, view

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str, total: int | None = None) -> None:
        self._view.phase(name, total)

    def advance(self, done: int, note: str = "") -> None:
        self._view.advance(done, note)

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        self._view.step(step, metrics, past)

    def say(self, line: str) -> None:
        _keep(self._run_dir, "said", line)
        self._view.say(line)

    def close(self) -> None:
        self._view.close()
