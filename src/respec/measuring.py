"""Puts the rooms together for measurements on a configuration's own task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from respec.adaptive import make_controller, samples
from respec.bench.rollout_peers import Work, bench_rollout, kinds_by_name
from respec.bench.rollouts import bench_rollouts
from respec.bench.speculation import bench_speculation
from respec.bench.step_peers import bench_step
from respec.bench.variants import variants_by_name
from respec.config import Config, ModelConfig, SpeculationConfig
from respec.drafting import make_drafters
from respec.errors import ConfigError
from respec.models.load import Policy, load_policy
from respec.report.provenance import usable_cores
from respec.report.surface import write_surface
from respec.rollout.draft.protocol import Drafter
from respec.rollout.planner import Planner
from respec.speculation.cost_model import CostModel, fit
from respec.standalone import model_of
from respec.tasks.task import load_task
from respec.types import Prompt
from respec.weights.publish import publish


def measure_profile(
    model: str,
    drafters: Sequence[str],
    max_batch: int,
    contexts: Sequence[int],
    threads: int,
    fresh: bool,
    picture: Path,
    say: Callable[[str], None],
) -> CostModel:
    """The full profile of a model on this machine, and a page that shows it. Raises ConfigError for a drafter that cannot be timed here."""
    known = get_args(SpeculationConfig.model_fields["candidates"].annotation)[0]
    if wrong := set(drafters) - set(get_args(known)):
        raise ConfigError(f"--drafter takes {', '.join(get_args(known))}; got '{wrong.pop()}'")
    torch.set_num_threads(threads or usable_cores())
    policy = load_policy(ModelConfig(path=model_of(model)))
    fits = [c for c in contexts if c + 256 <= policy.context_length] or [policy.context_length // 2]
    decoder = publish(policy, "auto", 0)
    asked = SpeculationConfig.model_validate({"candidates": tuple(drafters)})
    taken = samples(decoder, policy.tokenizer, make_drafters(asked, policy, "auto"), max_batch, fits, False, say, fresh)
    cost = fit(taken)
    write_surface(picture, taken, cost)
    return cost


def measure_speculation(
    config: Config,
    model: str | None,
    variants: Sequence[str],
    batches: Sequence[int],
    group: int,
    temperature: float,
    repeats: int,
    out: Path | None,
    say: Callable[[str], None],
    rollout: int = 0,
) -> dict[str, Any]:
    """`bench.speculation` on the held-out prompts of a configuration, by its model or another; with `rollout`, `bench.rollouts` of so many
    sequences. Raises ConfigError without prompts."""
    torch.set_num_threads(config.run.threads or usable_cores())
    chosen = config.model if model is None else config.model.model_copy(update={"path": model_of(model)})
    policy = load_policy(chosen)
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    if not task.held_out:
        raise ConfigError("task.eval_size is 0: there are no held-out prompts to measure on")
    decoder = publish(policy, config.model.dtype, 0)
    sampling = replace(config.rollout.sampling(), temperature=temperature)
    about = {
        "model": Path(chosen.path).name, "task": "+".join(config.task.names) or config.task.dataset or str(config.task.path), "temperature": temperature, "group": group,
        "max_new_tokens": sampling.max_new_tokens, "dtype": str(decoder.shape.dtype).removeprefix("torch."),
    }  # fmt: skip
    prompt = int(np.median([len(p.token_ids) for p in task.held_out]))

    def drafters(asked: SpeculationConfig) -> Sequence[Drafter]:
        return make_drafters(asked, policy, config.model.dtype)

    largest = rollout or max(batches)

    def controller(asked: SpeculationConfig) -> Planner:
        contexts = (prompt + sampling.max_new_tokens // 4,)
        taken = samples(decoder, policy.tokenizer, drafters(asked), largest, contexts, True, say)
        return make_controller(fit(taken), asked, largest)

    chosen_ways = variants_by_name(variants, config.speculation, controller, drafters)
    if rollout:
        return bench_rollouts(
            policy, decoder, task.held_out, chosen_ways, rollout, group, sampling, repeats, out, about, say
        )
    return bench_speculation(
        policy, decoder, task.held_out, chosen_ways, batches, group, sampling, repeats, out, about, say
    )


QUESTIONS = (
    "What is {a} plus {b} times {c}? Explain each step.",
    "Write a short story about a number {a} that met {b} and {c}.",
    "List {a} things that are larger than {b} but smaller than {c}.",
    "Why would somebody trade {a} apples for {b} pears and {c} plums?",
)


def measure_rollout(
    model: str,
    ours: Sequence[str],
    head: Path | None,
    peers: Sequence[str],
    config: Config | None,
    prompts: int,
    work: Work,
    check: bool,
    peers_in: Path,
    out: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`bench.rollout` on made-up questions, or on the held-out prompts of a configuration. `auto` may choose `eagle` where there is a `head`.

    Raises ConfigError for a name that is no way to draft or no peer, and for a configuration without held-out prompts.
    """
    kinds = kinds_by_name(peers)
    threads = work.threads or usable_cores()
    torch.set_num_threads(threads)
    path = model_of(model)
    policy = load_policy(ModelConfig(path=path, device="cpu"))
    # the reference that samples are judged by is transformers' own attention
    policy.model.set_attn_implementation("sdpa")
    decoder = publish(policy, "auto", 0)
    asked = _questions(policy.tokenizer, prompts) if config is None else _held_out(config, policy, prompts)
    candidates = ("suffix", "ngram") if head is None else ("suffix", "ngram", "eagle")
    base = SpeculationConfig(candidates=candidates, drafter_path=head)
    largest, context = max(work.batches), max(len(p.token_ids) for p in asked) + work.new_tokens // 4

    def drafters(wanted: SpeculationConfig) -> Sequence[Drafter]:
        return make_drafters(wanted, policy, "auto")

    def controller(wanted: SpeculationConfig) -> Planner:
        taken = samples(decoder, policy.tokenizer, drafters(wanted), largest, (context,), True, say)
        return make_controller(fit(taken), wanted, largest)

    ways = variants_by_name(ours, base, controller, drafters)
    task = "questions" if config is None else config.task.dataset or str(config.task.path)
    return bench_rollout(
        policy, decoder, path, asked, ways, kinds, replace(work, threads=threads), check, peers_in, out,
        {"model": Path(path).name, "task": task}, say,
    )  # fmt: skip


def measure_step(
    model: str,
    peers: Sequence[str],
    speculation: str,
    prompts: int,
    group: int,
    new_tokens: int,
    repeats: int,
    threads: int,
    peers_in: Path,
    out: Path | None,
    say: Callable[[str], None],
    learner: str = "float32",
) -> dict[str, Any]:
    """`bench.step` on made-up questions."""
    path, texts = model_of(model), _texts(prompts)
    torch.set_num_threads(threads or usable_cores())
    return bench_step(
        path, peers, speculation, texts, group, new_tokens, repeats, threads or usable_cores(), peers_in, out,
        {"model": Path(path).name}, say, learner,
    )  # fmt: skip


def _questions(tokenizer: Any, count: int) -> list[Prompt]:
    return [Prompt(row, text, tuple(tokenizer(text)["input_ids"])) for row, text in enumerate(_texts(count))]


def _texts(count: int) -> list[str]:
    return [QUESTIONS[i % len(QUESTIONS)].format(a=i + 2, b=3 * i + 1, c=7 * i + 5) for i in range(count)]


def _held_out(config: Config, policy: Policy, count: int) -> Sequence[Prompt]:
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    if not task.held_out:
        raise ConfigError("task.eval_size is 0: there are no held-out prompts to measure on")
    return task.held_out[:count]
