"""Keeps what a controller has learned beside a run's checkpoints: a run that goes on plans as the one that was stopped did.

It is about speed alone. Arrays are safetensors, all else is JSON in their header.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from respec.speculation.controller import Controller

FILE = "controller.safetensors"


def keep(controller: Controller, folder: Path) -> None:
    """Writes the file, or replaces it at once."""
    state, arrays = controller.state()
    scratch = folder / f".{FILE}.tmp"
    save_file(arrays, scratch, {"state": json.dumps(state)})
    scratch.replace(folder / FILE)


def recall(controller: Controller, folder: Path) -> bool:
    """Gives a new controller what `keep` wrote, and says whether there was anything: a file that cannot be read, or is of other plans, is
    nothing. What was learned of costs is left out where they were profiled anew."""
    try:
        with safe_open(folder / FILE, framework="numpy") as file:
            state = json.loads(file.metadata()["state"])
            return controller.restore(state, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False
