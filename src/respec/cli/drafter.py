"""`respec drafter`: drafters that are trained before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import ConfigPath, Sets, no_bars

drafter = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Drafters that are trained before a run.")


@drafter.callback()
def group() -> None:
    """Drafters that are trained before a run."""


@drafter.command()
def train(
    config: ConfigPath,
    to: Annotated[Path, typer.Option(help="Folder for the drafter.", show_default=False)],
    set: Sets = [],
    model: Annotated[
        str | None, typer.Option(help="A model folder or a run folder, instead of the configuration's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 300,
    tokens: Annotated[int, typer.Option(min=1, help="Completion tokens to draw and learn from.")] = 60_000,
    batch: Annotated[int, typer.Option(min=1, help="Completions in an optimizer step.")] = 32,
    s: Annotated[int, typer.Option(min=1, max=16, help="Drafted tokens that are learned for and measured.")] = 5,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Tokens that can be drafted, the most used ones; all of a smaller vocabulary.")
    ] = 2048,
    loss: Annotated[str, typer.Option(help="kl, tv, lk or e2e_tv.")] = "kl",
    lr: Annotated[float, typer.Option(min=1e-8)] = 1e-3,
    start: Annotated[Path | None, typer.Option(help="A drafter to go on from, instead of random weights.")] = None,
) -> None:
    """Train an EAGLE-3 drafter on the policy's own completions of a task's prompts; vLLM and speculators load it.

    Example: respec drafter train examples/demo.toml --to models/demo-eagle
    """
    from respec.config import load_config
    from respec.distillation import Recipe, distil_alone
    from respec.drafter.learner import LearnerSettings
    from respec.report.live import open_view
    from respec.standalone import model_of

    no_bars()
    settings = load_config(config, tuple(set))
    if model is not None:
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model_of(model)})})
    learning = LearnerSettings(loss=loss, depths=s, lr=lr, temperature=settings.rollout.temperature or 1.0)
    with open_view("drafter", steps) as view:
        done = distil_alone(settings, view, to, Recipe(tokens, steps, batch, vocabulary, start), learning)
    _closing(done)


def _closing(done: dict[str, Any]) -> None:
    table = Table("depth", "accepted", "before", box=None)
    for depth, (after, before) in enumerate(zip(done["acceptance_K"], done["before_K"], strict=True), 1):
        table.add_row(str(depth), f"{100 * after:.1f} %", f"{100 * before:.1f} %")
    Console().print(table)
    print(
        f"{done['accepted_length']:.2f} tokens a round expected of chains {len(done['acceptance_K'])} deep, on held-out prompts. "
        f"{done['parameters'] / 1e6:.1f} M parameters, {done['steps']} steps in {done['wall_s']:.0f} s, "
        f"from {done['completion_tokens']:,} tokens.\nsaved to {done['saved_to']}"
    )
