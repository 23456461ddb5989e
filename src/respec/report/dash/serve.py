"""Serves the live page on this machine's own address until Ctrl-C."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from respec.errors import ConfigError

ADDRESS = "127.0.0.1"


def serve(roots: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Answers until Ctrl-C or SIGTERM. `port` 0: any that is free. Raises ConfigError before it begins."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`respec dash` needs {' and '.join(missing)}; pip install 'respec-rl[serve]'")
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"there is no folder '{root}'; name run folders, or folders that hold them")
    import uvicorn

    from respec.report.dash.app import make_app
    from respec.report.dash.runs import Runs

    with bound(port) as listening:
        say(f"http://{ADDRESS}:{listening.getsockname()[1]}  (Ctrl-C ends it)")
        config = uvicorn.Config(
            make_app(Runs(roots)),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listening])


def bound(port: int) -> socket.socket:
    """A socket on this machine's own address. Raises ConfigError for a port that is taken or not allowed."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror}); take another, or --port 0 for any that is free"
        ) from None
    return listening
