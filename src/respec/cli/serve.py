"""`respec serve`: an OpenAI-compatible endpoint over a model or a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from respec.cli.app import app, no_bars
from respec.errors import ConfigError


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A run folder, a model folder, a hub id, or builtin:demo.")],
    host: Annotated[str, typer.Option(help="Where to listen. Another than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="RESPEC_API_KEY", help="What clients must show; better in the environment.", show_default=False
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The model's name for clients; without it, MODEL.")] = "",
    drafter: Annotated[str, typer.Option(help="auto, off, ngram, suffix, self_quant, eagle, model.")] = "auto",
    drafter_path: Annotated[Path | None, typer.Option(help="The head that drafter eagle drafts with.")] = None,
    draft_model: Annotated[str, typer.Option(help="The small model that drafter model drafts with.")] = "",
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a Jinja chat template, in place of the tokenizer's.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Completions decoded at once.")] = 8,
    max_length: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt with its completion; 0: the model's context, up to 2048.")
    ] = 0,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests under way; more are sent away with 429.")] = 64,
    max_completions: Annotated[int, typer.Option(min=1, help="The same for completions (n of every prompt).")] = 256,
    kv_cache_mb: Annotated[
        float | None,
        typer.Option(min=0, help="MiB of keys and values; completions without room wait.", show_default="no limit"),
    ] = None,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Serve a policy by the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, /health.

    A run is followed: its newest checkpoint answers, while it trains and after.

    Example: respec serve runs/demo --port 8000
    """
    from respec.config import SpeculationConfig
    from respec.serving import serve as run

    try:
        asked = {"drafter": drafter, "drafter_path": drafter_path, "draft_model": draft_model}
        speculation = SpeculationConfig.model_validate(asked)
        template = chat_template.read_text() if chat_template is not None else None
    except (ValueError, OSError) as error:
        raise ConfigError(f"respec serve cannot begin: {error}") from None
    no_bars()
    logging.basicConfig(level=logging.WARNING, format="respec: %(message)s")
    logging.getLogger("respec.serve").setLevel(logging.INFO)
    limits = {"requests": max_requests, "completions": max_completions}
    try:
        run(
            model, host, port, api_key, name, speculation, dtype, device, max_batch, max_length, template, limits,
            kv_cache_mb=kv_cache_mb,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("\nended")
