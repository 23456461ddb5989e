"""A drafter's offline distillation, put together from the rooms: the policy draws completions, a head learns from them and is saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from respec.config import Config
from respec.drafter.agreement import write_agreement
from respec.drafter.distil import DistilStats, distil, draft_vocabulary
from respec.drafter.learner import LearnerSettings
from respec.errors import ConfigError
from respec.models.eagle import EagleHead, check_fits, create_head, load_head, save_head
from respec.models.load import Policy, load_policy
from respec.report.live import View
from respec.report.provenance import usable_cores
from respec.rollout.engine import Engine
from respec.tasks.task import load_task
from respec.types import Ask, Prompt, Rollout, RoundRecord, Sampling, Stream
from respec.weights.publish import publish

HELD_OUT = 64


@dataclass(frozen=True)
class Recipe:
    """How much is drawn and learned. `tokens` completion tokens to learn from, `steps` optimizer steps of `batch` completions each;
    at most `vocabulary` tokens can be drafted. `start` is a head to go on from.
    """

    tokens: int = 60_000
    steps: int = 300
    batch: int = 32
    vocabulary: int = 2048
    start: Path | None = None


def distil_alone(config: Config, view: View, to: Path, recipe: Recipe, settings: LearnerSettings) -> dict[str, Any]:
    """Trains a head for the configuration's model on what it says to its task's prompts, saves it to `to`, and says how it drafts.

    Completions are drawn as in training, by plain decoding; acceptance is on held-out prompts. Raises ConfigError without any of those.
    """
    torch.set_num_threads(config.run.threads or usable_cores())
    policy = load_policy(config.model)
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    if not task.held_out:
        raise ConfigError("task.eval_size is 0: there are no held-out prompts to measure the drafter on")
    start = _start(recipe, policy)
    engine = Engine(
        publish(policy, config.model.dtype, 0), policy.tokenizer, policy.eos_token_ids, config.run.seed,
        config.rollout.max_batch, config.rollout.prefill_chunk, kv_budget=config.rollout.kv_bytes,
    )  # fmt: skip
    sampling, group = config.rollout.sampling(), config.rollout.group_size
    drawn = _draw(engine, task.train, sampling, group, recipe.tokens, view)
    held_out = engine.rollout([Ask(p, Stream.BENCH, 0, 1) for p in task.held_out[:HELD_OUT]], sampling)[0]
    chosen = draft_vocabulary(drawn, recipe.vocabulary, policy.model.config.vocab_size)
    source = str(Path(config.model.path).resolve()) if Path(config.model.path).is_dir() else config.model.path
    head = start or create_head(policy.model, chosen, config.run.seed, source)
    view.phase("features", len(drawn))

    def learned(done: int, loss: float) -> None:
        if done == 1:
            view.phase("distillation", recipe.steps)
        view.advance(done, f"loss {loss:.3f}")

    stats = distil(
        policy.model, head, drawn, held_out, sampling, settings, recipe.steps, recipe.batch, config.run.seed,
        learned, view.advance,
    )  # fmt: skip
    save_head(head, to)
    write_agreement(to, stats.agreement)
    return _summary(stats, head, drawn, to)


def _start(recipe: Recipe, policy: Policy) -> EagleHead | None:
    if recipe.start is None:
        return None
    head = load_head(recipe.start, next(policy.model.parameters()).dtype).to(policy.model.device)
    check_fits(head, policy.model)
    return head


def _draw(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, group: int, tokens: int, view: View
) -> list[Rollout]:
    """Completions of the training prompts, epoch after epoch, until they have as many tokens as wanted."""
    view.phase("generation", tokens)
    drawn, done = list[Rollout](), 0

    def show(record: RoundRecord) -> None:
        nonlocal done
        done += record.emitted
        view.advance(min(done, tokens), f"{record.active} active")

    for draw in itertools.count():
        for start in range(0, len(prompts), 16):
            asks = [Ask(prompt, Stream.TRAIN, draw, group) for prompt in prompts[start : start + 16]]
            drawn += engine.rollout(asks, sampling, on_round=show)[0]
            if done >= tokens:
                return drawn
    raise AssertionError("there is always another epoch")


def _summary(stats: DistilStats, head: EagleHead, drawn: Sequence[Rollout], to: Path) -> dict[str, Any]:
    return asdict(stats) | {
        "completions": len(drawn),
        "completion_tokens": sum(len(rollout.token_T) for rollout in drawn),
        "parameters": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "draft_vocabulary": head.shape.draft_vocabulary,
        "saved_to": str(to),
    }
