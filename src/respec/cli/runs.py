"""Runs and their stages: train, warmup, eval, generate, export, report."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from respec.cli.app import ConfigPath, Sets, app, no_bars, print_error
from respec.errors import ConfigError

DRAFTERS = ("auto", "off", "ngram", "suffix", "self_quant", "eagle", "model")


@app.command()
def train(
    config: ConfigPath,
    set: Sets = [],
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run folder first.")] = False,
) -> None:
    """Train, or go on with, a run. Ctrl-C once ends after the step with a checkpoint, twice at once.

    Example: respec train examples/demo.toml --set policy.lr=1e-4 --set run.dir=runs/mine
    """
    from respec.config import load_config

    settings = load_config(config, tuple(set))
    from respec.loop import train as run
    from respec.report.live import open_view

    no_bars()
    again = shlex.join(["respec", "train", str(config), *(word for item in set for word in ("--set", item))])
    try:
        with open_view(settings.run.dir.name, settings.run.steps) as view:
            stop = _interruptible(view.say)
            summary = run(settings, view, stop, fresh)
    except KeyboardInterrupt:
        print_error(f"stopped at once; from the last checkpoint go on with: {again}")
        raise typer.Exit(130) from None
    _closing(summary)
    if not summary["finished"]:
        print(f"\nStopped after step {summary['steps']}, with a checkpoint. Go on with: {again}")


@app.command()
def warmup(
    config: ConfigPath,
    set: Sets = [],
    to: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    checkpoints: Annotated[
        int, typer.Option(min=1, help="Save so often; `respec entropy` tells which to begin RL from.")
    ] = 1,
) -> None:
    """Supervised warm-up on the task's worked solutions; saves the model.

    Example: respec warmup examples/smollm2.toml --to models/warm
    """
    from respec.config import load_config
    from respec.report.live import open_view
    from respec.standalone import warm_up_alone

    no_bars()
    settings = load_config(config, tuple(set))
    with open_view("warm-up", settings.warmup.steps) as view:
        done = warm_up_alone(settings, view, to, checkpoints)
    print(json.dumps(done, indent=2))


@app.command()
def eval(
    config: Annotated[Path, typer.Argument(help="A TOML file, or a run folder.", show_default=False)],
    set: Sets = [],
    model: Annotated[
        str | None, typer.Option(help="A model folder or a run folder, instead of the configuration's.")
    ] = None,
) -> None:
    """Held-out accuracy of a model on a configuration's task. CONFIG may be a run folder: then its last checkpoint.

    Example: respec eval examples/demo.toml --model runs/demo
    """
    from respec.config import load_config
    from respec.report.live import open_view
    from respec.standalone import evaluate_alone, model_of

    no_bars()
    if config.is_dir():
        model, config = model or str(config), config / "config.toml"
    settings = load_config(config, tuple(set))
    with open_view("evaluation", 1) as view:
        result = evaluate_alone(settings, view, Path(model_of(model)) if model else None)
    print(
        f"held-out accuracy {100 * result.accuracy:.1f} % ± {100 * result.standard_error:.1f} ({result.items} items), "
        f"mean length {result.mean_length:.1f} tokens, entropy {result.mean_entropy:.3f} nats/token"
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model folder, a run folder, a hub id, or builtin:demo.")],
    prompt: Annotated[
        list[str], typer.Option(help="The text to go on from; \\n is a line break. May be given many times.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    stop: Annotated[list[str], typer.Option(help="A string that ends a completion.")] = [],
    samples: Annotated[int, typer.Option(min=1)] = 1,
    drafter: Annotated[str, typer.Option(help=f"{', '.join(DRAFTERS)}.")] = "suffix",
    drafter_path: Annotated[Path | None, typer.Option(help="The head that drafter eagle drafts with.")] = None,
    draft_model: Annotated[str, typer.Option(help="The small model that drafter model drafts with.")] = "",
    seed: int = 0,
    chat: Annotated[
        str, typer.Option(help="auto, never or always: whether a prompt is a user's turn in the model's chat template.")
    ] = "auto",
    system: Annotated[str, typer.Option(help="A system prompt, for a model with a chat template.")] = "",
) -> None:
    """Draw completions through the rollout engine.

    Example: respec generate builtin:demo --prompt "3 + 4 - 2 + 9\\n" --samples 4
    """
    from respec.config import SpeculationConfig
    from respec.opening import check
    from respec.standalone import generate_alone, model_of
    from respec.types import Sampling

    if chat not in ("auto", "never", "always"):
        raise ConfigError(f"--chat takes auto, never or always, got '{chat}'")
    if drafter not in DRAFTERS:
        raise ConfigError(f"--drafter takes {', '.join(DRAFTERS)}, got '{drafter}'")
    if drafter == "eagle" and drafter_path is None:
        raise ConfigError(
            "--drafter eagle needs --drafter-path, a head for this policy (`respec drafter train` makes one)"
        )
    if drafter == "model" and not draft_model:
        raise ConfigError("--drafter model needs --draft-model, a small model with the policy's tokenizer")
    asked = {"drafter": drafter, "drafter_path": drafter_path, "draft_model": draft_model}
    speculation = SpeculationConfig.model_validate(asked)
    no_bars()
    sampling = Sampling(
        max_new_tokens, temperature, top_k, top_p, 0.0, tuple(text.replace("\\n", "\n") for text in stop)
    )
    check(sampling, samples, seed)
    texts = [text.replace("\\n", "\n") for text in prompt]
    rollouts, stats = generate_alone(
        model_of(model), texts, sampling, speculation, samples, seed, chat=chat, system_prompt=system
    )
    for rollout in rollouts:
        print(
            f"--- prompt {rollout.prompt.row}, sample {rollout.sample}, {len(rollout.token_T)} tokens, ended by {rollout.finish}"
        )
        print(rollout.text)
    print(
        f"--- {stats.tokens} tokens, {stats.tokens_per_s:.0f} tokens/s, {stats.accepted_length:.2f} tokens a round and sequence"
    )


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="An RL step; without it, the last one.")] = None,
) -> None:
    """Why the adaptive server drafted as it did: load, estimates, the best plans, and the reason, decision by decision.

    Example: respec explain runs/demo --step 12
    """
    from respec.report.records import DECISIONS, read_decisions, recorded_steps
    from respec.speculation.decision import Decision
    from respec.speculation.explain import explain as explained

    known = recorded_steps(run, DECISIONS)
    if not known:
        raise ConfigError(f"'{run}' holds no decisions: it is no run folder, or speculation.drafter was not 'auto'")
    chosen = known[-1] if step is None else step
    if chosen not in known:
        raise ConfigError(f"step {chosen} has no decisions; recorded are steps {known[0]} to {known[-1]}")
    print(f"step {chosen} of '{run}'")
    print(explained([Decision.from_dict(item) for item in read_decisions(run, chosen)]))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write the HTML report of a run, finished or not.

    Example: respec report runs/demo
    """
    from respec.report.html import write_report

    if not (run / "config.toml").exists():
        raise ConfigError(f"'{run}' is not a run folder (it has no config.toml); give the folder that run.dir named")
    print(write_report(run))


def _interruptible(say: Callable[[str], None]) -> Callable[[], bool]:
    """The first Ctrl-C (or SIGTERM) asks the loop to stop after its step; the next raises KeyboardInterrupt."""
    asked = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # a signal may come in the middle of a line being printed, where printing again is an error: then the line is dropped
        with contextlib.suppress(RuntimeError):
            say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: asked


def _closing(summary: dict[str, Any]) -> None:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    split = summary["time_split"]
    whole = sum(split.values()) or 1.0
    table = Table(title="Result", show_header=False)
    if summary["reward_first"] is not None:
        table.add_row("reward", f"{summary['reward_first']:.3f} -> {summary['reward_last']:.3f} (first -> last step)")
    items = (
        f" ({summary['accuracy_items']} items, ± {share(summary['accuracy_se'])})" if summary["accuracy_items"] else ""
    )
    table.add_row(
        "held-out accuracy",
        f"{share(summary['accuracy_before_rl'])} -> {share(summary['accuracy_after_rl'])}{items}",
    )
    parts = (f"{name.removesuffix('_s')} {100 * seconds / whole:.0f} %" for name, seconds in split.items())
    table.add_row("time split", ", ".join(parts))
    table.add_row("time in all", f"{summary['wall_s']:.0f} s")
    if summary["rollout_speedup"] is not None:
        table.add_row("rollout speedup", f"{summary['rollout_speedup']:.2f}x against plain decoding")
        if summary["tokens_identical"] is not None:
            table.add_row("tokens identical", "yes" if summary["tokens_identical"] else "NO")
    if summary["policy_entropy"] is not None:
        table.add_row("policy entropy", f"{summary['policy_entropy']:.3f} nats/token")
    Console().print(table)
    print(f"run folder  {summary['run_dir']}\nreport      {summary['report']}")
