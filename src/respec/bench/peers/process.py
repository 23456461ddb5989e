"""A worker seen from the benchmark: started, asked, and held still while another is timed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from respec.errors import ConfigError

WORKERS = Path(__file__).parent
# Seconds that a worker has to end by itself.
PATIENCE = 5.0
SHOWN_LINES = 12


@dataclass(frozen=True)
class PeerKind:
    """A peer that can be measured. `environment` is its folder under `.peers`; `options` go to its worker's `load`."""

    environment: str
    worker: str
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)


_VLLM = {"speculation": None, "depth": 0, "eager": False, "mended": False}
ROLLOUT_PEERS = {
    "generate": PeerKind("hf", "generate_worker.py", "float32"),
    "generate-bf16": PeerKind("hf", "generate_worker.py", "bfloat16"),
    "vllm": PeerKind("vllm", "vllm_worker.py", "bfloat16", _VLLM),
    "vllm-ngram": PeerKind("vllm", "vllm_worker.py", "bfloat16", _VLLM | {"speculation": "ngram"}),
    "vllm-ngram-mended": PeerKind(
        "vllm", "vllm_worker.py", "bfloat16", _VLLM | {"speculation": "ngram", "mended": True}
    ),
}
STEP_PEERS = {
    "trl": PeerKind("hf", "trl_worker.py", "float32", {"checkpointing": True}),
    "trl-unchecked": PeerKind("hf", "trl_worker.py", "float32", {"checkpointing": False}),
}


def python_of(kind: PeerKind, root: Path) -> str:
    """The interpreter of a peer's environment. Raises ConfigError when `make peers` has not made it."""
    python = root / kind.environment / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"there is no '{python}': peers run in environments of their own, which `make peers` makes")
    return str(python)


class Worker:
    """A worker's process. Between requests it is stopped, with all its children, so that nothing of it spins while another is timed."""

    def __init__(self, name: str, python: str, script: Path, log: Path) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        # a session of its own: Ctrl-C reaches us, and we end it
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """One request and its answer. Raises ConfigError, with the end of the worker's log, for an error or an end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._awake():
            try:
                self._process.stdin.write(json.dumps({"do": what} | values) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        answer = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
            raise ConfigError(
                f"peer '{self.name}' failed at '{what}': {answer['error']}; the end of {self._log}:\n{tail}"
            )
        return answer

    def family(self) -> list[psutil.Process]:
        """The process and all below it that are alive."""
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Ends it, by force if it does not end by itself."""
        family = self.family()
        _each(family, "resume")
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        _each(family, "kill")
        self._process.wait()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        _each(self.family(), "resume")
        try:
            yield
        finally:
            _each(self.family(), "suspend")


def _each(family: list[psutil.Process], act: str) -> None:
    for process in family:
        try:
            getattr(process, act)()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def workers(
    names: Mapping[str, PeerKind], root: Path, own: Mapping[str, Path] | None = None
) -> Iterator[dict[str, Worker]]:
    """A running worker for each peer, and for each script of our `own` under our own interpreter; all are ended with the block."""
    commands = {name: (python_of(kind, root), WORKERS / kind.worker) for name, kind in names.items()}
    commands |= {name: (sys.executable, script) for name, script in (own or {}).items()}
    running: dict[str, Worker] = {}
    # a stopped worker would outlive us for ever
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name, (python, script) in commands.items():
            running[name] = Worker(name, python, script, root / "logs" / f"{name}.log")
        yield running
    finally:
        for worker in running.values():
            worker.close()
        signal.signal(signal.SIGTERM, before)
