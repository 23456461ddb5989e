"""JSON lines between a benchmark and a peer in a process of its own: one request a line, one answer a line.

A worker is run as a script by the Python of its own environment, which need not have `respec`: so this file, and the workers beside it,
import nothing of it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers requests, `{"do": name, ...}`, until standard input ends. What a handler raises is answered as `{"error": ...}`.

    Whatever libraries print goes to standard error, so that nothing stands between the answers.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = dict(handlers[request["do"]](request))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def peak_memory() -> int:
    """The most bytes that this process has held so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
