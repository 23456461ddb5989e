"""Rows of JSON-lines files, with columns named in the configuration."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.render import Rendered, Row
from respec.types import Message

# Names under which rewards get the prompt and the completion; a column of the same name is left out, as in TRL.
_TAKEN = {"prompt", "prompts", "completion", "completions", "completion_ids"}


def read_rows(path: Path, config: TaskConfig, needs_answer: bool) -> tuple[Row, ...]:
    """Reads a file; blank lines are skipped. Every row gets every column of the file, None where it has none.

    Raises TaskError, with the line's number, for bad JSON, a missing column, or a prompt of the wrong form; and for a
    missing or empty file.
    """
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
    columns = tuple(dict.fromkeys(name for _, fields in parsed for name in fields))
    return tuple(_row(fields, columns, f"line {number} of '{path}'", config, needs_answer) for number, fields in parsed)


def split(
    rows: Sequence[Rendered], held_out: Sequence[Rendered] | None, config: TaskConfig
) -> tuple[tuple[Rendered, ...], tuple[Rendered, ...], tuple[Rendered, ...]]:
    """(train, held-out, all that is not held out), each without repeated prompts, shuffled by the seed.

    With an evaluation file (`held_out`) its prompts leave the training rows. Without one, the file is split: held-out
    rows first, so that they do not depend on train_size, and at most a third of the file.

    Raises TaskError if a side that was asked for would be empty.
    """
    rows = _shuffled(_distinct(rows), config.seed, "train")
    if held_out is None:
        size = min(config.eval_size, max(1, len(rows) // 3))
        held, rest = rows[:size], rows[size:]
    else:
        held = _shuffled(_distinct(held_out), config.seed, "held-out")[: config.eval_size]
        texts = {item.text for item in held_out}
        rest = tuple(item for item in rows if item.text not in texts)
    if not rest:
        raise TaskError(
            f"'{config.path}' has {len(rows)} different prompts, and none is left for training beside the held-out "
            f"rows; add rows, or set task.eval_size = 0"
        )
    return rest[: config.train_size], held, rest


def shuffled_for(stream: str, rows: Sequence[Rendered], seed: int) -> tuple[Rendered, ...]:
    """The rows in the stream's own order, a function of the seed."""
    return _shuffled(tuple(rows), seed, stream)


def _distinct(rows: Iterable[Rendered]) -> tuple[Rendered, ...]:
    first: dict[str, Rendered] = {}
    for item in rows:
        first.setdefault(item.text, item)
    return tuple(first.values())


def _shuffled(rows: tuple[Rendered, ...], seed: int, stream: str) -> tuple[Rendered, ...]:
    order = list(rows)
    random.Random(f"{seed}/{stream}").shuffle(order)
    return tuple(order)


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


def _row(fields: dict[str, Any], columns: tuple[str, ...], place: str, config: TaskConfig, needs_answer: bool) -> Row:
    prompt = need(fields, config.prompt_column, "prompt_column", place)
    if needs_answer:
        need(fields, config.answer_column, "answer_column", place)
    full = {name: fields.get(name) for name in columns}
    kept = {name: value for name, value in full.items() if name not in _TAKEN or name == config.answer_column}
    return Row(_prompt(prompt, config.prompt_column, place), full, kept, place)


def need(fields: Mapping[str, Any], column: str, key: str, place: str) -> Any:
    """A column's value. Raises TaskError, with the nearest columns, where it is missing or null."""
    if fields.get(column) is not None:
        return fields[column]
    near = difflib.get_close_matches(column, list(fields), n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else "it has " + (", ".join(f"'{name}'" for name in fields) or "none")
    what = f"column '{column}' is null in {place}" if column in fields else f"{place} has no column '{column}'; {hint}"
    raise TaskError(f"{what} (task.{key} = '{column}')")


def _prompt(value: Any, column: str, place: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise TaskError(
            f"column '{column}' of {place} is {_kind(value)}; it must be text or a list of chat messages "
            '[{"role": ..., "content": ...}]'
        )
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TaskError(
                f"column '{column}' of {place} holds a chat message that is not an object with a text 'role' and a text "
                f"'content': {json.dumps(message)[:80]}"
            )
    return tuple(value)


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"
