"""Rows of JSON-lines files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from respec.errors import TaskError
from respec.tasks.columns import Table


def read_jsonl(path: Path) -> Table:
    """Reads a file; blank lines are skipped. Raises TaskError, with the line's number, for bad JSON; and for a missing or empty file."""
    try:
        # Not splitlines(): it would also split at the line separators that JSON strings may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise TaskError(
            f"there is no file '{path}' (working directory '{Path.cwd()}'); mend task.path or task.eval_path"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"'{path}' cannot be read as JSON lines in UTF-8: {error}") from None
    parsed = [(number, _parse(line, path, number)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not parsed:
        raise TaskError(f"'{path}' has no rows; it should hold one JSON object on each line")
    return [(f"line {number} of '{path}'", fields) for number, fields in parsed]


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(
            f"line {number} of '{path}' is not valid JSON: {error.msg} (character {error.pos + 1})"
        ) from None
    if not isinstance(fields, dict):
        raise TaskError(f"line {number} of '{path}' is a JSON {type(fields).__name__}; each line must be an object")
    return fields
