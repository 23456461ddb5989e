"""The command `respec certify`: progress, a table, an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import app, no_bars
from respec.errors import ConfigError

if TYPE_CHECKING:
    from respec.certify.finding import Certificate


@app.command()
def certify(
    model: Annotated[str, typer.Option(help="A model folder, a run folder, a hub id, or builtin:demo.")],
    engine: Annotated[
        str | None,
        typer.Option(help="native, torch or vllm; native where this machine has it.", show_default=False),
    ] = None,
    vllm_python: Annotated[
        str, typer.Option(help="Engine vllm: the Python that has vLLM; this one by default.", show_default=False)
    ] = "",
    drafter: Annotated[list[str], typer.Option(help="Only these; may be given many times.")] = [],
    head: Annotated[Path | None, typer.Option(help="An EAGLE-3 head, for drafter eagle.")] = None,
    draft_model: Annotated[str, typer.Option(help="A small model with the same tokenizer, for drafter model.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="A text file, one prompt a line; \\n is a line break.")] = None,
    tokens: Annotated[
        int, typer.Option(min=256, help="Tokens of each statistical check: four times as many see half the bias.")
    ] = 2048,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    to: Annotated[Path | None, typer.Option("--json", help="Write the certificate here, for a program.")] = None,
) -> None:
    """Check that speculation is exact for a model on this machine; exit code 1 if something failed.

    Example: respec certify --model models/smollm2 --json certificate.json
    """
    import torch

    from respec.certification import certify as run
    from respec.certification import default_drafters
    from respec.certify.prompts import PROMPTS
    from respec.report.provenance import usable_cores
    from respec.standalone import model_of

    no_bars()
    torch.set_num_threads(threads or usable_cores())
    texts = PROMPTS if prompts is None else _lines(prompts)
    if engine == "vllm":
        from respec.remote import refuse_unknown
        from respec.remote_certification import certify_vllm

        for name in drafter:
            refuse_unknown(name)
        _show(
            certify_vllm(
                model_of(model), vllm_python or sys.executable, drafter or ("ngram",), texts, tokens,
                threads=torch.get_num_threads(), head=head, draft_model=draft_model, say=lambda line: print(line, flush=True),
            ),
            to,
        )  # fmt: skip
        return
    known = default_drafters(head, draft_model)
    unknown = [name for name in drafter if name not in known]
    if unknown:
        raise ConfigError(
            f"--drafter takes {', '.join(known)} here, got '{unknown[0]}' (eagle needs --head, model needs --draft-model)"
        )
    chosen = {name: make for name, make in known.items() if not drafter or name in drafter}
    _show(run(model_of(model), engine, chosen, texts, tokens, say=lambda line: print(line, flush=True)), to)


def _show(certificate: Certificate, to: Path | None) -> None:
    """The table, the file and the exit code."""
    if to is not None:
        to.write_text(json.dumps(certificate.as_json(), indent=2) + "\n")
    table = Table("", "check", "of", "finding", box=None, pad_edge=False)
    for finding in certificate.findings:
        mark = {"passed": "✓", "failed": "✗", "unchecked": "–"}[finding.outcome]
        table.add_row(mark, finding.check, finding.subject, finding.sentence)
    Console().print(table)
    counts = [
        f"{sum(finding.outcome == outcome for finding in certificate.findings)} {outcome}"
        for outcome in ("passed", "failed", "unchecked")
    ]
    held = ", ".join(f"{key} {value}" for key, value in certificate.circumstances.items())
    print(f"{'exact' if certificate.passed else 'NOT EXACT'}: {', '.join(counts)}, in {certificate.wall_s:.0f} s")
    print(f"{certificate.model} with {certificate.engine} ({held})")
    if not certificate.passed:
        raise typer.Exit(1)


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: '{path}' cannot be read: {error}; give a text file, one prompt a line") from None
    return [line.replace("\\n", "\n") for line in lines if line.strip()]
