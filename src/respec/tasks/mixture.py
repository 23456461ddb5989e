"""Several tasks in one run: their rows under ids of the mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.leakage import words_in
from respec.types import Prompt, Shown

if TYPE_CHECKING:
    from respec.tasks.task import Task


def mix(config: TaskConfig, load: Callable[[TaskConfig], Task]) -> Task:
    """The mixture of a configuration, its tasks loaded by `load`. Their row ids follow on one another, in the order of the sections.

    What `load` raises goes on up."""
    parts: dict[str, Task] = {}
    first = 0
    for name, section in zip(config.names, config.mixture, strict=True):
        part = load(section)
        parts[name] = replace(part, train=_under(part.train, name, first), held_out=_under(part.held_out, name, first))
        first += len(part.train) + len(part.held_out)
    parts, leaks = _apart(parts)
    weights = {name: section.weight for name, section in zip(config.names, config.mixture, strict=True)}
    notes = (*(f"{name}: {note}" for name, part in parts.items() for note in part.notes), *leaks)
    trained = [part for name, part in parts.items() if weights[name]]
    return replace(
        trained[0],
        name="+".join(parts),
        train=tuple(prompt for part in trained for prompt in part.train),
        held_out=_in_turn([part.held_out for part in parts.values()]),
        reward_min=min(part.reward_min for part in parts.values()),
        solve=lambda n: _worked(parts, weights, n),
        notes=notes,
        parts=parts,
    )


def _under(prompts: Sequence[Prompt], name: str, first: int) -> tuple[Prompt, ...]:
    return tuple(replace(prompt, task=name, row=first + prompt.row) for prompt in prompts)


def _apart(parts: Mapping[str, Task]) -> tuple[dict[str, Task], list[str]]:
    """The tasks without training rows that another of them holds out, told by the prompts as the model sees them; and lines that say so."""
    held = {words_in(prompt.text) for part in parts.values() for prompt in part.held_out}
    cleaned: dict[str, Task] = {}
    said: list[str] = []
    for name, part in parts.items():
        train = tuple(prompt for prompt in part.train if words_in(prompt.text) not in held)
        cleaned[name] = replace(part, train=train)
        if part.train and not train:
            raise TaskError(
                f"task '{name}' of the mixture has no training rows that no other task holds out; leave one of them out"
            )
        if len(train) < len(part.train):
            said.append(
                f"{name}: {len(part.train) - len(train)} training rows are held out by another task of the mixture, and were removed"
            )
    return cleaned, said


def _in_turn(parts: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    """One of each in turn, so that however few are looked at, all tasks are among them."""
    return tuple(prompt for prompt in chain.from_iterable(zip_longest(*parts)) if prompt is not None)


def _worked(parts: Mapping[str, Task], weights: Mapping[str, float], n: int) -> tuple[tuple[Prompt, str | Shown], ...]:
    """Worked solutions of the tasks that have some, in proportion to their weights. Raises TaskError where none has."""
    found, reasons, total = list[tuple[tuple[Prompt, str | Shown], ...]](), list[str](), sum(weights.values())
    for name, part in parts.items():
        share = round(n * weights[name] / total)
        try:
            found.append(part.worked(share) if share else ())
        except TaskError as error:
            reasons.append(f"{name}: {error}")
    if not any(found):
        raise TaskError("no task of the mixture has worked solutions: " + "; ".join(reasons))
    return tuple(pair for pairs in found for pair in pairs)
