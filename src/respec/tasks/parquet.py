"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from respec.errors import TaskError
from respec.tasks.columns import Table

# Rows decoded at once; no more of a file than its first row groups is read for the first few rows.
_BATCH = 256


def read_parquet(path: Path, count: int | None = None) -> Table:
    """The rows of a file, or of all files below a folder in the order of their paths; the first `count` of them, if given.

    Raises TaskError where pyarrow is not installed, and for what is not there, is no Parquet file, or has no rows.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        what = f"no Parquet file in the folder '{path}'" if path.is_dir() else f"no file '{path}'"
        raise TaskError(f"there is {what} (working directory '{Path.cwd()}'); mend task.path or task.eval_path")
    table = list(islice((row for file in files for row in _rows(file)), count))
    if not table:
        raise TaskError(f"'{path}' has no rows")
    return table


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise TaskError(
            "task.kind = 'parquet' needs pyarrow, which is not installed: pip install 'respec-rl[data]'"
        ) from None
    number = 0
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"row {number} of '{file}'", fields
    except (ArrowException, OSError) as error:
        raise TaskError(f"'{file}' cannot be read as Parquet: {str(error).splitlines()[0]}") from None
