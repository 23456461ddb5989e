"""The worker's process seen from respec: started, asked under a time limit, ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar

from respec.errors import VllmError
from respec.rollout.vllm.worker.wire import Failed, Message, WireError, from_line, to_line

SCRIPT = Path(__file__).parent / "worker" / "main.py"
HEARTBEAT_S = 0.2
FAREWELL_S = 5.0
SHOWN_LINES = 15
# Memory that files can lie in, so that weights do not go by the disk.
SHARED = Path("/dev/shm")
Kind = TypeVar("Kind", bound=Message)


class Worker:
    """A running worker, `script` run by `python`. `folder` is a place for weights that it can read, gone when it is ended; `log` holds what vLLM says.

    Whoever is interrupted while it waits for an answer ends the worker: what came later must not be taken for the answer to something else.
    """

    def __init__(
        self, python: str, log: Path, script: Path = SCRIPT, environment: Mapping[str, str] | None = None
    ) -> None:
        self.python, self._log = python, log
        if shutil.which(python) is None:
            raise VllmError(
                f"rollout.vllm.python: there is no '{python}'; name the Python of an environment that has vLLM"
            )
        log.parent.mkdir(parents=True, exist_ok=True)
        shared = SHARED if os.access(SHARED, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="respec-vllm-", dir=shared))
        with log.open("w") as errors:
            # a session of its own: Ctrl-C is for us, and the whole group can be ended
            self._process = subprocess.Popen(
                [python, "-u", str(script), str(self.folder), str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True, env=_environment() | dict(environment or {}),
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Sends a message. Raises VllmError when the worker is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_line(message))
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise VllmError(f"the vLLM worker {self._death()}{self._tail()}") from None

    def hear(self, limit_s: float, *kinds: type[Kind]) -> Kind:
        """The next message, which must be of these kinds. Raises VllmError, with the end of its log, when the worker fails, is gone, or says
        nothing for `limit_s` seconds; it has then been ended, but for a Failed."""
        try:
            line = self._await(limit_s)
            message = from_line(line)
        except WireError as error:
            self.kill()
            raise VllmError(f"the vLLM worker said what is {error}{self._tail()}") from None
        except BaseException:
            self.kill()
            raise
        if isinstance(message, Failed):
            raise VllmError(f"vLLM failed: {message.kind}: {message.text}{self._tail()}")
        if not isinstance(message, kinds):
            self.kill()
            raise VllmError(f"the vLLM worker answered with {type(message).__name__}, out of turn{self._tail()}")
        return message

    def ask(self, message: Message, limit_s: float, kind: type[Kind]) -> Kind:
        """A message and its answer."""
        self.tell(message)
        return self.hear(limit_s, kind)

    def close(self) -> None:
        """Lets the worker end by itself; ends it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """Ends the worker and all that it has started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await(self, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s
        while True:
            left = deadline - time.monotonic()
            try:
                line = self._lines.get(timeout=max(0.0, min(left, HEARTBEAT_S)))
            except queue.Empty:
                if self._process.poll() is None and left > 0:
                    continue
                line = None
            if line is not None:
                return line
            if self._process.poll() is None and left <= 0:
                self.kill()
                raise VllmError(
                    f"the vLLM worker said nothing for {limit_s:g} s and was ended; if it needs longer, raise rollout.vllm.timeout_s{self._tail()}"
                )
            raise VllmError(f"the vLLM worker {self._death()}{self._tail()}")

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_S)
        self.kill()
        code = self._process.returncode
        if code >= 0:
            return f"ended its process (exit code {code})"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        killed = "; the machine may have been out of memory" if name == "SIGKILL" else ""
        return f"ended its process (signal {name}{killed})"

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            if lines:
                return f"; the end of {self._log}:\n" + "\n".join(lines)
        return ""

    def _listen(self, stream: IO[str]) -> None:
        with stream, contextlib.suppress(OSError, ValueError):
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)


def _environment() -> dict[str, str]:
    """Ours, without what would make another Python take our packages for its own."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
