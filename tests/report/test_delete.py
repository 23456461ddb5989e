"""`--fresh` deletes a run that has ended, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from respec.errors import ConfigError, RunDirError
from respec.report.delete import delete_run

HOLD = "import sys; from pathlib import Path; from respec.report import lock; lock.acquire(Path(sys.argv[1])); print('held', flush=True); input()"


def test_a_run_that_goes_on_is_not_deleted_and_one_that_was_killed_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(RunDirError, match=f"in use by process {holder.pid}"):
        delete_run(run)
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "lock"]
    holder.kill()
    holder.wait()
    delete_run(run)
    assert not run.exists()


def test_a_folder_that_holds_no_run_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        delete_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    delete_run(tmp_path / "absent")
