"""The live page of runs, and the names of what it shows: dash, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from respec.cli.app import app


@app.command()
def dash(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that hold them; 'runs' without any.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8787,
) -> None:
    """Serve the reports of running and past runs, live, to this machine alone.

    Example: respec dash runs --port 0
    """
    from respec.report.dash.serve import serve

    serve(runs or [Path("runs")], port, lambda line: print(line, flush=True))


@app.command()
def metrics() -> None:
    """Print every metric's name, unit and meaning, as docs/metrics.md has them.

    Example: respec metrics
    """
    from respec.report.metrics_page import metrics_page

    print(metrics_page(), end="")
