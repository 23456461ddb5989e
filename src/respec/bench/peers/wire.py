"""JSON lines between a benchmark and a worker in a process of its own: one request a line, one answer a line.

A peer's worker is run as a script by the Python of the peer's environment, which need not have `respec`: so this file, and those workers,
import nothing of it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Request = Mapping[str, Any]
Handler = Callable[[Request], Mapping[str, Any]]


class Wire:
    """A worker's end. Whatever libraries print from here on goes to standard error, so that nothing stands between the answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def receive(self) -> Request | None:
        """The next request; None when there will be no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def send(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def fail(self, error: Exception) -> None:
        """Says what went wrong; the traceback goes to standard error. To be called while the error is handled."""
        traceback.print_exc()
        self.send({"error": f"{type(error).__name__}: {error}"})


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers requests, `{"do": name, ...}`, until there are no more. What a handler raises is answered as `{"error": ...}`."""
    wire = Wire()
    while (request := wire.receive()) is not None:
        try:
            wire.send(handlers[request["do"]](request))
        except Exception as error:
            wire.fail(error)


def parts(prompts: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The prompts, `size` at a time: what is in flight together."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def peak_memory() -> int:
    """The most bytes that this process has held so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def distinct_words(texts: Sequence[str]) -> list[float]:
    """The reward of `bench step`: cheap, and never the same for all of a group, so that there is always something to learn."""
    return [len(set(text.split())) / 100 for text in texts]
