"""The parent's side of the worker process: start it, ask it under a time limit, end it.

A fresh interpreter, not a fork: safe beside torch's threads, and a user's script need not guard its main module. It talks
over its standard streams; when the parent goes, however it goes, the worker sees the end of its input and goes too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, cast

from respec import errors

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from respec.tasks.worker import main; main()"
_HEARTBEAT_S = 0.2
_FAREWELL_S = 1.0


class WorkerLost(Exception):
    """The worker was lost over a request: it died, or ran over the time limit and was killed. Reads on from 'the function'."""

    def __init__(self, message: str, hung: bool) -> None:
        super().__init__(message)
        self.hung = hung


class WorkerRaised(Exception):
    """The request raised, or returned something that cannot be used. The worker lives."""


class WorkerProcess:
    """One running worker. Not restarted by itself: after WorkerLost it is gone."""

    def __init__(self) -> None:
        path = [os.path.abspath(entry) for entry in sys.path]
        # Fixed hashing: what walks through a set does so in the same order in every process, or a resumed run would differ.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent; and a group of its own can be killed whole
        )
        self._input = cast(IO[bytes], self._process.stdin)
        self._replies: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, kind: str, payload: Any, limit_s: float) -> Any:
        """The worker's answer to one request.

        Raises WorkerLost if it dies or does not answer within `limit_s` seconds, WorkerRaised if the request failed
        there, and the RespecError that the request raised. Any interruption (Ctrl-C) ends the worker, too: an answer that
        comes later must not be taken for that of another request.
        """
        try:
            pickle.dump((kind, payload), self._input, protocol=pickle.HIGHEST_PROTOCOL)
            self._input.flush()
            status, value = self._await(limit_s)
        except BrokenPipeError:
            raise WorkerLost(self._death(), hung=False) from None
        except BaseException:
            self.kill()
            raise
        if status == "ok":
            return value
        if status == "raised":
            raise WorkerRaised(value)
        raise getattr(errors, status)(value)

    def close(self) -> None:
        """Lets the worker end by itself; kills it if it does not."""
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """Ends the worker and the processes it started, now."""
        if self._process.returncode is None:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()

    def _await(self, limit_s: float) -> tuple[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            left = deadline - time.monotonic()
            try:
                reply = self._replies.get(timeout=max(0.0, min(left, _HEARTBEAT_S)))
            except queue.Empty:
                # A child of the worker may hold its output open: its death need not show as the end of the stream.
                if self._process.poll() is not None:
                    raise WorkerLost(self._death(), hung=False) from None
                if left <= 0:
                    raise WorkerLost(f"ran over its time limit of {limit_s:g} s", hung=True) from None
                continue
            if reply is None:
                raise WorkerLost(self._death(), hung=False)
            return reply

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)
        self.kill()
        code = self._process.returncode
        if code >= 0:
            return f"ended its process (exit code {code})"
        try:
            return f"ended its process (signal {signal.Signals(-code).name})"
        except ValueError:
            return f"ended its process (signal {-code})"

    def _listen(self, stream: IO[bytes]) -> None:
        with stream, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self._replies.put(pickle.load(stream))
        self._replies.put(None)
