"""Deletes a run, and nothing that is none."""

from __future__ import annotations

import shutil
from pathlib import Path

from respec.errors import ConfigError
from respec.report import lock


def delete_run(path: Path) -> None:
    """Deletes the run folder if there is one. Raises ConfigError for a folder that holds no run, RunDirError for a run that goes on."""
    if path.exists():
        if not (path / "config.toml").exists():
            raise ConfigError(
                f"--fresh would delete '{path}', which holds no run; delete it yourself, or name another run.dir"
            )
        lock.acquire(path)  # goes with the folder
        shutil.rmtree(path)
