"""From the columns of a table to a task's rows: whatever file they were read from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.answers import FORMS
from respec.tasks.render import Row
from respec.types import Message

Table = Sequence[tuple[str, Mapping[str, Any]]]
"""Rows as a file gives them: where each is, for errors, and its columns."""

# Names under which rewards get the prompt and the completion; a column of the same name is left out, as in TRL.
_TAKEN = {"prompt", "prompts", "completion", "completions", "completion_ids"}
# The column that holds an answer taken out of a longer text.
ANSWER = "answer"
_LIMITS = {"temperature": (0.0, 100.0), "max_new_tokens": (1, 10**9), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0)}


def scored_column(config: TaskConfig) -> str:
    """The column that rewards find a row's answer in."""
    return config.answer_column if config.answer_form == "plain" else ANSWER


def rows_of(table: Table, config: TaskConfig, needs_answer: bool) -> tuple[Row, ...]:
    """Every row gets every column, None where it has none.

    Raises TaskError, saying where, for a missing column, a prompt of the wrong form, an answer that is not found in its text, or a
    sampling setting that is no number or out of range.
    """
    columns = tuple(dict.fromkeys(name for _, fields in table for name in fields))
    missing = [name for name in config.sampling_columns if table and name not in columns]
    if missing:
        raise TaskError(
            f"task.sampling_columns names '{missing[0]}', and the data has no such column; it has {_quoted(columns)}"
        )
    return tuple(_row(fields, columns, place, config, needs_answer) for place, fields in table)


def need(fields: Mapping[str, Any], column: str, key: str, place: str) -> Any:
    """A column's value. Raises TaskError, with the nearest columns, where it is missing or null."""
    if fields.get(column) is not None:
        return fields[column]
    near = difflib.get_close_matches(column, list(fields), n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else "it has " + _quoted(fields)
    what = f"column '{column}' is null in {place}" if column in fields else f"{place} has no column '{column}'; {hint}"
    raise TaskError(f"{what} (task.{key} = '{column}')")


def _row(
    fields: Mapping[str, Any], columns: tuple[str, ...], place: str, config: TaskConfig, needs_answer: bool
) -> Row:
    prompt = need(fields, config.prompt_column, "prompt_column", place)
    answer = need(fields, config.answer_column, "answer_column", place) if needs_answer else None
    full = {name: fields.get(name) for name in columns}
    kept = {name: value for name, value in full.items() if name not in _TAKEN or name == config.answer_column}
    if answer is not None and config.answer_form != "plain":
        kept[ANSWER] = _final(answer, config, place)
    sampling = {
        name: _setting(fields[name], name, place) for name in config.sampling_columns if fields.get(name) is not None
    }
    return Row(_prompt(prompt, config.prompt_column, place), full, kept, place, sampling)


def _final(answer: Any, config: TaskConfig, place: str) -> str:
    found = FORMS[config.answer_form](str(answer))
    if found is None:
        raise TaskError(
            f"column '{config.answer_column}' of {place} holds no answer of the form '{config.answer_form}' (task.answer_form): "
            f"it ends with {str(answer)[-60:]!r}; mend the row, or set another form"
        )
    return found


def _setting(value: Any, name: str, place: str) -> float | int:
    low, high = _LIMITS[name]
    whole = name == "max_new_tokens"
    usable = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not usable or (whole and value != int(value)) or (name == "min_p" and value == 1):
        raise TaskError(
            f"column '{name}' of {place} is {value!r}; as a sampling setting (task.sampling_columns) it must be "
            + ("a whole number of at least 1" if whole else f"a number from {low:g} to {high:g}")
        )
    return int(value) if whole else float(value)


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


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
