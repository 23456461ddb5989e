"""TensorBoard events, always those of metrics.jsonl: one event file, rebuilt whenever a run is gone on with."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from respec.report.records import StepMetrics

EVENTS = "events"


def available() -> bool:
    """Whether tensorboard is installed and can be imported."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


class Events:
    """Writes steps as TensorBoard scalars. Needs tensorboard."""

    def __init__(self, run_dir: Path, steps: Sequence[StepMetrics]):
        """Starts afresh with `steps`; events that were there before are gone."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        folder = run_dir / EVENTS
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), flush_secs=30)
        for record in steps:
            self.add(record)
        self._writer.flush()

    def add(self, record: StepMetrics) -> None:
        for name, value in record.metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()
