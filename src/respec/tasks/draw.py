"""Drawing different prompts from a reasoning-gym dataset: endless, by seed, never the same prompt twice."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from typing import Any

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.process import WorkerLost, WorkerProcess, WorkerRaised
from respec.tasks.render import Rendered, Renderer, Row

_CHUNK = 512
_PIECE = 32
_LEAST_PATIENCE = 2048
_LIMIT_S = 600.0
"""Seconds that one piece of rows may take: some parameters send a dataset's generator round in circles for ever."""


def draw(
    process: WorkerProcess,
    config: TaskConfig,
    renderer: Renderer,
    stream: str,
    count: int,
    without: Set[str],
    key: str,
) -> tuple[Rendered, ...]:
    """`count` rows with different prompt texts, none of them in `without`: a function of `config`, `stream` and these.

    Goes on until many draws in a row bring nothing new. Then, and for a bad name or bad parameters, raises TaskError; `key` is
    the configuration key that asked for the rows.
    """
    found: dict[str, Rendered] = {}
    # Where one prompt of N is still missing, and about N are wanted, this many draws miss it with probability exp(-8).
    patience = max(_LEAST_PATIENCE, 8 * count)
    size = max(_CHUNK, count)
    chunk = fruitless = 0
    while len(found) < count:
        _ask(process, config, "open", (config.dataset, config.params, _derive(config.seed, stream, chunk), size))
        chunk += 1
        start = 0
        while start < size and len(found) < count:
            before = len(found)
            # No more than are missing, since a row may take seconds to make; but more and more while none is new.
            stop = min(start + min(_PIECE, count - before + fruitless), size)
            for columns in _ask(process, config, "rows", (start, stop)):
                fields = {**columns["metadata"], **columns}
                row = Row(columns["question"], fields, columns, f"a row of '{config.dataset}'")
                item = renderer.render(row)
                if item.text not in without and len(found) < count:
                    found.setdefault(item.text, item)
            fruitless = 0 if len(found) > before else fruitless + stop - start
            start = stop
        if len(found) < count and fruitless >= patience:
            apart = f" besides the {len(without)} held-out ones" if without else ""
            raise TaskError(
                f"{key} asks for {count} different prompts, but reasoning-gym's '{config.dataset}' with these parameters "
                f"gave only {len(found)}{apart}; lower {key}, or widen task.params"
            )
    return tuple(found.values())


def _ask(process: WorkerProcess, config: TaskConfig, kind: str, payload: Any) -> Any:
    try:
        return process.ask(kind, payload, _LIMIT_S)
    except (WorkerLost, WorkerRaised) as error:
        raise TaskError(
            f"making rows of reasoning-gym's '{config.dataset}' with {config.params} failed: its process {error}; "
            "change task.params"
        ) from error


def _derive(seed: int, stream: str, chunk: int) -> int:
    """A seed far from its neighbours: reasoning-gym seeds row i with seed + i, so that near seeds share rows."""
    digest = hashlib.sha256(f"{seed}/{stream}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
