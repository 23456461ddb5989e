"""The application that the commands are put into, and what they share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from respec import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ConfigPath = Annotated[Path, typer.Argument(help="A TOML file; see examples/.", show_default=False)]
Sets = Annotated[list[str], typer.Option("--set", help="Change a key: section.key=value. May be given many times.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"respec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:  # fmt: skip
    """Reinforcement learning of language models whose rollouts are fast, exact and speculative.

    Start with: respec train examples/demo.toml
    """


def print_error(text: str) -> None:
    print(f"respec: {text}", file=sys.stderr)


def no_bars() -> None:
    """transformers' bars for reading weights would be drawn across the live view."""
    from transformers.utils import logging

    logging.disable_progress_bar()
