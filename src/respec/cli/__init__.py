"""The command line: `respec train CONFIG.toml` and its smaller relatives. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys

from respec.cli import dash, drafter, entropy, export, runs, serve, verification, workbench
from respec.cli.app import app, print_error
from respec.errors import RespecError

__all__ = ["app", "dash", "entropy", "export", "main", "runs", "serve", "verification", "workbench"]

app.add_typer(drafter.drafter, name="drafter")
# `respec --help` lists commands as a user comes to need them, as the README does; the modules above are imported by the alphabet.
ORDER = (
    "train", "warmup", "eval", "generate", "report", "dash", "explain", "serve", "export", "certify", "doctor", "profile", "entropy", "metrics",
)  # fmt: skip
_place = {name: place for place, name in enumerate(ORDER)}
app.registered_commands.sort(key=lambda command: _place.get(getattr(command.callback, "__name__", ""), len(ORDER)))


def main() -> None:
    """The entry point: a RespecError is one paragraph and exit code 2, not a traceback."""
    try:
        app()
    except RespecError as error:
        print_error(str(error))
        sys.exit(2)
