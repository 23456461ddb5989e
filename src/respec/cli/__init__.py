"""The command line: `respec train CONFIG.toml` and its smaller relatives. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys

from respec.cli import dash, drafter, entropy, export, runs, serve, verification, workbench
from respec.cli.app import app, print_error
from respec.errors import RespecError

__all__ = ["app", "dash", "entropy", "export", "main", "runs", "serve", "verification", "workbench"]

app.add_typer(drafter.drafter, name="drafter")


def main() -> None:
    """The entry point: a RespecError is one paragraph and exit code 2, not a traceback."""
    try:
        app()
    except RespecError as error:
        print_error(str(error))
        sys.exit(2)
