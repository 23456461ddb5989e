"""A process that calls a fixed list of Python functions, for what may hang or end its process. Speaks JSON, a line a call.

Run as a module it is the process itself: the first argument is the JSON list of functions, `module:function`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from respec.errors import TaskError

START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Done:
    """What a call gave: a value that JSON holds, or an error in words."""

    value: Any = None
    error: str = ""


class ToolProcess:
    """Calls the functions `specs` and no others, each for at most `limit_s` seconds: then its process is ended, and the next call starts another.

    Raises TaskError for a function that cannot be found.
    """

    def __init__(self, specs: Sequence[str], limit_s: float) -> None:
        self._specs, self._limit_s = tuple(specs), limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._running()
        atexit.register(self.close)

    def call(self, spec: str, arguments: Mapping[str, Any]) -> Done:
        """`spec` must be one of `specs`; raises KeyError otherwise."""
        if spec not in self._specs:
            raise KeyError(spec)
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps([spec, dict(arguments)]).encode() + b"\n")
        child.stdin.flush()
        line = _line(child.stdout, self._limit_s)
        if line is None:
            self.close()
            return Done(error=f"it took more than {self._limit_s:g} s")
        if not line:
            status = child.wait()
            self.close()
            return Done(error=f"it ended its process (status {status})")
        return Done(*json.loads(line))

    def close(self) -> None:
        """Ends the process, if there is one. A later call starts another."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            command = [sys.executable, "-m", __name__, json.dumps(self._specs)]
            path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
            )
            assert self._child.stdout is not None
            ready = _line(self._child.stdout, START_LIMIT_S)
            error = json.loads(ready)[1] if ready else "the process did not start"
            if error:
                self.close()
                raise TaskError(f"task.params: {error}; name tools and questions as 'module:function'")
        return self._child


def _line(stream: IO[bytes], limit_s: float) -> bytes | None:
    """The next line; empty where the stream has ended, None where nothing came in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(limit_s) else None


def _found(spec: str) -> Callable[..., Any]:
    module, _, path = spec.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    if not callable(target):
        raise TypeError(f"'{spec}' is a {type(target).__name__}, not a function")
    return target


def _serve(specs: Sequence[str]) -> None:
    """Answers calls with [value, error] until its input ends. What functions print goes to the error stream."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(value: Any, error: str = "") -> None:
        out.write(json.dumps([value, error]) + "\n")

    try:
        functions = {spec: _found(spec) for spec in specs}
    except Exception as error:
        say(None, f"{type(error).__name__}: {error}")
        return
    say(None)
    for line in sys.stdin:
        spec, arguments = json.loads(line)
        try:
            value = functions[spec](**arguments)
            json.dumps(value)
        except Exception as error:
            say(None, f"{type(error).__name__}: {error}")
        else:
            say(value)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
