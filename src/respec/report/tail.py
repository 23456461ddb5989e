"""Reads metrics.jsonl as it grows: each call gives the steps that were added since the one before, whatever the file's length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from respec.errors import RunDirError
from respec.report.records import METRICS_FILE, StepMetrics, parse_metrics


class Tail:
    """Where one reader is in a run's metrics.jsonl. Needs no lock; a line that is being written is left for the next call."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / METRICS_FILE
        self._file = 0
        self._at = 0

    def read(self) -> tuple[bool, list[StepMetrics]]:
        """Whether the file was put back or replaced, so that what was read before is void, and the steps that are new.

        Raises RunDirError for a damaged line; the next call begins at it again.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            anew, self._file, self._at = self._at > 0, 0, 0
            return anew, []

    def _read(self, file: BinaryIO) -> tuple[bool, list[StepMetrics]]:
        stat = os.fstat(file.fileno())
        # a run that goes on from a checkpoint puts another file in its place
        anew = self._at > 0 and (stat.st_ino != self._file or stat.st_size < self._at)
        self._file = stat.st_ino
        if anew:
            self._at = 0
        file.seek(self._at)
        steps: list[StepMetrics] = []
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                steps.append(parse_metrics(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunDirError(
                    f"a line of '{self._path}' at byte {self._at} is damaged ({error}); remove it to read the rest"
                ) from None
            self._at += len(line)
        return anew, steps
