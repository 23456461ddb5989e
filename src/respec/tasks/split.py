"""Which rows of a table are trained on, which are held out, and which are left for worked solutions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.leakage import Leaks, find_leaks
from respec.tasks.render import Rendered


@dataclass(frozen=True)
class Split:
    """`rest` is all that is not held out, `train` its first rows. `repeated` rows had a prompt that came before; `leaks` are training rows
    that are held out too."""

    train: tuple[Rendered, ...]
    held: tuple[Rendered, ...]
    rest: tuple[Rendered, ...]
    repeated: int
    leaks: Leaks

    def notes(self, config: TaskConfig) -> tuple[str, ...]:
        """Lines for the user, of what was found and done."""
        said = [f"{self.repeated} rows repeat an earlier row's prompt and were left out"] if self.repeated else []
        return (*said, *self.leaks.notes(config.leakage))


def split(rows: Sequence[Rendered], held_out: Sequence[Rendered] | None, config: TaskConfig) -> Split:
    """Each side without repeated prompts and shuffled by the seed; training rows that are held out too leave as `config.leakage` says.

    With evaluation rows of their own (`held_out`) all their prompts leave the training rows, not only those evaluated on. Without, the table
    is split: held-out rows first, so that they do not depend on train_size, and at most a third of it. A task of weight 0 is only
    evaluated on: all of its rows are held out.

    Raises TaskError if a side that was asked for would be empty.
    """
    every, different = len(rows), _distinct(rows)
    rows = _shuffled(different, config.seed, "train")
    if not config.weight:
        alone = _shuffled(_distinct(held_out), config.seed, "held-out") if held_out is not None else rows
        return Split((), alone[: config.eval_size], (), every - len(different), Leaks())
    if held_out is None:
        size = min(config.eval_size, max(1, len(rows) // 3))
        held, rest = rows[:size], rows[size:]
        against = held
    else:
        held = _shuffled(_distinct(held_out), config.seed, "held-out")[: config.eval_size]
        rest, against = rows, _distinct(held_out)
    leaks = find_leaks(rest, against)
    rest = leaks.without(rest, config.leakage)
    if not rest:
        raise TaskError(
            f"'{config.path or config.dataset}' has {len(rows)} different prompts, and none is left for training beside the held-out "
            f"rows; add rows, or set task.eval_size = 0"
        )
    return Split(rest[: config.train_size], held, rest, every - len(different), leaks)


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
