"""`respec entropy`: which of several models RL should begin from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import Sets, app, no_bars


@app.command()
def entropy(
    models: Annotated[list[str], typer.Argument(help="Model folders, run folders or hub ids.", show_default=False)],
    config: Annotated[Path, typer.Option(help="The configuration whose task and sampling they are tried with.")],
    set: Sets = [],
    items: Annotated[int, typer.Option(min=1, help="Held-out rows to try them on.")] = 128,
    floor: Annotated[
        float | None, typer.Option(min=0, help="Nats a token; without it warmup.entropy_floor, else 0.05.")
    ] = None,
) -> None:
    """Rank warm-up checkpoints by token entropy, and warn of those under a floor: RL learns by what it can choose between.

    The checkpoints are those of `respec warmup --checkpoints 4 --to models/warm`.

    Example: respec entropy models/warm/step-* models/warm --config examples/smollm2.toml
    """
    from respec.config import load_config
    from respec.entropy import NEARLY_CERTAIN, ranked, warnings
    from respec.report.live import open_view

    no_bars()
    settings = load_config(config, tuple(set))
    least = floor if floor is not None else settings.warmup.entropy_floor or NEARLY_CERTAIN
    with open_view("entropy", len(models)) as view:
        candidates = ranked(settings, models, items, view)
    table = Table("", box=None)
    table.add_column("model", overflow="fold")
    for name in ("entropy (nats/token)", "accuracy", "length"):
        table.add_column(name)
    for place, candidate in enumerate(candidates, 1):
        result = candidate.probe
        accuracy = f"{100 * result.accuracy:.1f} % ± {100 * result.standard_error:.1f}"
        table.add_row(
            str(place), candidate.model, f"{result.mean_entropy:.4f}", accuracy, f"{result.mean_length:.1f} tokens"
        )
    Console().print(table)
    for line in (line for item in candidates for line in warnings(item.model, item.probe, least)):
        print(f"warning: {line}")
