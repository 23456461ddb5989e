"""A run's policy for other programs: `respec export`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from respec.cli.app import app, no_bars
from respec.errors import ConfigError


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model or an adapter.")],
    merged: Annotated[Path | None, typer.Option(help="Folder for the whole model, an adapter merged in.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder for the adapter alone, in peft's format.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the merged weights.")] = "float32",
) -> None:
    """Write a run's policy, as of its last checkpoint, as a Hugging Face folder or as an adapter.

    Example: respec export runs/lora_smollm2 --merged models/mine --dtype bfloat16
    """
    from respec.standalone import export_merged, model_of

    if merged is None and adapter is None:
        raise ConfigError("export needs --merged DIR, --adapter DIR, or both")
    for target in filter(None, (merged, adapter)):
        if target.exists():
            raise ConfigError(f"'{target}' exists already; name a new folder, or delete it")
    source = Path(model_of(str(run)))
    if adapter is not None:
        files = [*source.glob("adapter_*"), *source.glob("*token*"), *source.glob("chat_template*")]
        if not (source / "adapter_config.json").exists():
            raise ConfigError(f"'{run}' holds no adapter: its run was without [policy.lora]; use --merged")
        adapter.mkdir(parents=True)
        for file in files:
            shutil.copy2(file, adapter)
        print(f"adapter     {adapter}")
    if merged is not None:
        no_bars()
        export_merged(str(source), merged, dtype)
        print(f"model       {merged}")
