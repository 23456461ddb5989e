"""`respec serve` put together: an engine, the thread that it decodes in, the web server, and the run whose newest weights it follows."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from respec.config import SpeculationConfig
from respec.errors import ConfigError, RespecError
from respec.models.load import load_policy
from respec.opening import is_run, model_config, newest
from respec.text_engine import Engine
from respec.weights.checkpoint import FOLDER, NAME

log = logging.getLogger("respec.serve")

# Seconds that answers under way are given to end after Ctrl-C.
GRACE_S = 5


class Follower:
    """Looks every `every_s` seconds for a newer checkpoint of a run, and hands its policy to `deliver` with its step."""

    def __init__(
        self, run: str, version: int, dtype: str, device: str, deliver: Callable[[Any, int], None], every_s: float = 2.0
    ) -> None:
        self._run, self._version, self._dtype, self._device = run, version, dtype, device
        self._deliver, self._every_s = deliver, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> bool:
        """Delivers a newer policy, if there is one that can be read; says whether there was."""
        folder = Path(self._run) / FOLDER
        names = [NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        # reading a checkpoint through takes long, and its name says whether it is newer
        if max((int(match[2]) for match in names if match), default=0) <= self._version:
            return False
        path, step = newest(self._run)
        if step <= self._version:
            return False
        self._deliver(load_policy(model_config(path, self._dtype, self._device)), step)
        self._version = step
        return True

    def _follow(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.look()
            except (RespecError, OSError) as error:  # the run may be putting it away just now
                log.warning("the newest checkpoint of '%s' cannot be read yet: %s", self._run, error)


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    name: str = "",
    speculation: str | SpeculationConfig = "auto",
    dtype: str = "auto",
    device: str = "auto",
    max_batch: int = 8,
    max_length: int = 0,
    chat_template: str | None = None,
    limits: dict[str, int] | None = None,
    say: Callable[[str], None] = print,
    kv_cache_mb: float | None = None,
) -> None:
    """Serves a model or a run until it is told to end (SIGINT, SIGTERM). `limits` are fields of `serve.app.Limits`.

    Raises ConfigError for an address that cannot be had, for one that others can reach without a key, and where the web server is not
    installed; ModelError and CheckpointError as `Engine` does.
    """
    try:
        import uvicorn

        from respec.serve.app import LOOPBACK, Limits, Service
        from respec.serve.decoding import DecodingThread
    except ImportError as error:
        raise ConfigError(
            f"serving needs starlette and uvicorn ({error}); install them: pip install 'respec-rl[serve]'"
        ) from None
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"'{host}' can be reached from other machines, so a key is required: set RESPEC_API_KEY, or give --api-key"
        )
    with closing(_bound(host, port)) as listening:
        engine = Engine(
            model, speculation=speculation, dtype=dtype, device=device, max_batch=max_batch, max_length=max_length,
            chat_template=chat_template, say=say, kv_cache_mb=kv_cache_mb,
        )  # fmt: skip
        bounds = Limits(**{"tokens": engine.max_length, **(limits or {})})
        decoding = DecodingThread(engine, bounds.tokens)
        service = Service(decoding, engine.tokenizer, name or model, int(time.time()), bounds, key or None)
        config = uvicorn.Config(
            service.app(), log_level="warning", timeout_graceful_shutdown=GRACE_S, lifespan="on", server_header=False
        )
        followed = is_run(model)
        listening.listen()  # who comes before the server is up waits
        what = f"run '{model}' at version {engine.version}, and follows it" if followed else f"'{model}'"
        say(f"respec serves {what}: http://{_shown(host)}:{listening.getsockname()[1]}/v1 (Ctrl-C ends it)")
        server = uvicorn.Server(config)
        if not followed:
            return server.run(sockets=[listening])
        with Follower(model, engine.version, dtype, device, decoding.renew):
            return server.run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens; before the model is loaded, so that a port in use is said at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(f"the address {host}:{port} cannot be had: {error}; take another --port or --host") from None
    return listening


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
