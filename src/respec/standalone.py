"""Single stages of a run, for the command line and for scripts: warm-up, evaluation, generation, export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from respec.adaptive import make_planner
from respec.config import Config, ModelConfig, SpeculationConfig, TaskConfig
from respec.drafting import make_drafters
from respec.errors import ConfigError
from respec.models.load import load_policy
from respec.opening import newest
from respec.policy.warmup import warm_up
from respec.report.live import View
from respec.report.provenance import usable_cores
from respec.rollout.engine import Engine
from respec.stages import build, evaluate
from respec.tasks.mixed_reward import reward_of
from respec.tasks.render import Renderer, Row
from respec.tasks.task import load_task
from respec.types import Ask, EvalResult, Rollout, RolloutStats, Sampling, Stream
from respec.weights.export import save_model
from respec.weights.publish import publish

WARMED_UP = "warm-up"


def warm_up_alone(config: Config, view: View, to: Path | None = None, checkpoints: int = 1) -> dict[str, Any]:
    """The `[warmup]` of a configuration, its policy evaluated before and after, and saved as a Hugging Face folder.

    With `checkpoints` n it is saved n times, evenly spaced, those before the last as step-... within the folder. Saved to `to`, else to warmup.save_to, else beside the run folder. Raises ConfigError when the configuration asks for no steps.
    """
    if not config.warmup.steps:
        raise ConfigError("warmup.steps is 0: there is nothing to do; set it, for example --set warmup.steps=500")
    target = to or config.warmup.save_to or config.run.dir.with_name(f"{config.run.dir.name}-{WARMED_UP}")
    torch.set_num_threads(config.run.threads or usable_cores())
    policy = load_policy(config.model)
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    pairs = task.worked(config.warmup.train_size)
    before = evaluate_alone(config, view, None)
    view.phase("warm-up", config.warmup.steps)
    total = config.warmup.steps
    between = {total * (i + 1) // checkpoints for i in range(checkpoints)} - {0, total}

    def on_step(done: int, loss: float) -> None:
        view.advance(done, f"loss {loss:.3f}")
        if done in between:
            save_model(policy, target / f"step-{done:06d}")

    stats = warm_up(policy, pairs, config.warmup, config.run.seed, on_step)
    save_model(policy, target)
    after = evaluate_alone(config, view, target)
    return {
        "steps": stats.steps, "first_loss": stats.first_loss, "last_loss": stats.last_loss, "tokens": stats.tokens,
        "wall_s": stats.wall_s, "accuracy_before": before.accuracy, "accuracy_after": after.accuracy, "saved_to": str(target),
    }  # fmt: skip


def evaluate_alone(
    config: Config, view: View, model_path: Path | str | None, sampling: Sampling | None = None, items: int = 0
) -> EvalResult:
    """Held-out accuracy of `model_path` (None: the configuration's own model) on the configuration's task.

    `sampling` None is evaluation's own; `items` 0 takes eval.final_items of the held-out rows.
    """
    if model_path is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model_path)})})
    torch.set_num_threads(config.run.threads or usable_cores())
    policy = load_policy(config.model)
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    if not task.held_out:
        raise ConfigError("task.eval_size is 0: there are no held-out items to evaluate on")
    with reward_of(task, config.task) as reward:
        stages = build(config, policy, task, reward, view, version=0)
        return evaluate(stages, task.held_out[: items or config.eval.final_items or None], sampling)


def generate_alone(
    model: str,
    texts: Sequence[str],
    sampling: Sampling,
    speculation: SpeculationConfig,
    samples: int = 1,
    seed: int = 0,
    dtype: str = "auto",
    chat: Literal["auto", "never", "always"] = "auto",
    system_prompt: str = "",
    say: Callable[[str], None] | None = None,
) -> tuple[tuple[Rollout, ...], RolloutStats]:
    """`samples` completions of each text by a local folder, a hub id or `builtin:demo`, through the rollout engine.

    A text is a user's turn where the tokenizer has a chat template (`chat` says when). Raises TaskError for one that does not fit the
    model's context.
    """
    policy = load_policy(ModelConfig.model_validate({"path": model, "dtype": dtype}))
    asked = TaskConfig(dataset="prompts", chat=chat, system_prompt=system_prompt)
    renderer = Renderer(asked, policy.tokenizer, policy.context_length, sampling.max_new_tokens)
    rows = [Row(text, {}, {}, f"prompt {number}") for number, text in enumerate(texts)]
    prompts = renderer.prompts([renderer.render(row) for row in rows], first_row=0)
    drafters = make_drafters(speculation, policy, dtype)
    decoder, batch = publish(policy, dtype, 0), min(64, samples * len(prompts))
    engine = Engine(
        decoder,
        policy.tokenizer,
        policy.eos_token_ids,
        seed,
        max_batch=batch,
        drafters=drafters,
    )
    context = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens // 4
    planner = make_planner(
        speculation,
        decoder,
        policy.tokenizer,
        drafters,
        batch,
        context,
        say or (lambda _: None),
    )
    if say is not None:
        say(f"{sum(p.numel() for p in policy.model.parameters()) / 1e6:.1f} M parameters loaded")
    return engine.rollout([Ask(prompt, Stream.BENCH, 0, samples) for prompt in prompts], sampling, planner)


def export_merged(model: str, folder: Path, dtype: str) -> None:
    """Writes a policy as a Hugging Face folder of that dtype; an adapter is merged in float32, then rounded."""
    policy = load_policy(ModelConfig(path=model, device="cpu"))
    policy.model.to(getattr(torch, dtype))
    save_model(policy, folder)


def model_of(path: str) -> str:
    """A run folder's last checkpoint, or the path itself: what commands that take either load.

    Raises CheckpointError for a run that has none yet.
    """
    return newest(path, print)[0]
