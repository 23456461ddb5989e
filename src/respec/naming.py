"""What a step and an evaluation did, under the names that report/metrics.py explains: the loop's numbers, and nobody else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from respec.report.echo import repetition
from respec.report.surprise import Surprise
from respec.stages import Stages, evaluate
from respec.types import Rollout, RolloutStats, ScoredRollout, UpdateStats


@dataclass(frozen=True)
class Generated:
    """One step's rollouts, and what a comparison with plain decoding showed (None when there was none, or none is promised to be equal)."""

    rollout_R: tuple[Rollout, ...]
    stats: RolloutStats
    plain: RolloutStats | None
    identical: bool | None


def metrics_of(
    made: Generated, scored: Sequence[ScoredRollout], update: UpdateStats, names: Sequence[str], own: Surprise
) -> dict[str, float]:
    stats, rewards = made.stats, np.array([item.reward for item in scored])
    lengths = np.array([item.rollout.drawn for item in scored])
    groups = [np.array([s.reward for s in g]) for _, g in groupby(scored, key=lambda s: s.rollout.key[:2])]
    metrics = {
        "reward/mean": rewards.mean(), "reward/std": rewards.std(),
        "reward/fell_back": sum(bool(item.fell_back) for item in scored),
        "length/mean": lengths.mean(), "length/max": lengths.max(),
        "length/truncated_share": np.mean([item.rollout.truncated for item in scored]),
        "group/spread": np.mean([group.std() for group in groups]),
        "rollout/repetition": repetition([item.rollout for item in scored]),
        "group/no_spread_share": np.mean([np.ptp(group) == 0 for group in groups]),
        "policy/loss": update.loss, "policy/entropy": update.entropy, "policy/clip_fraction": update.clip_fraction,
        "policy/grad_norm": update.grad_norm, "policy/lr": update.lr, "policy/ratio_mean": update.ratio_mean,
        "policy/mismatch_mean": update.mismatch_mean, "policy/mismatch_max": update.mismatch_max,
        "policy/tokens": update.tokens, "policy/minibatches": update.minibatches,
        "rollout/tokens_per_s": stats.tokens_per_s, "rollout/accepted_length": stats.accepted_length,
        "rollout/draft_acceptance": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "rollout/entropy": np.concatenate([item.rollout.entropy_T[item.rollout.drawn_T] for item in scored]).mean(),
        "rollout/tokens": stats.tokens, "rollout/prompt_tokens": stats.prompt_tokens, "rollout/rounds": len(stats.round_R),
        "time/generation_s": stats.wall_s, "time/prefill_s": stats.prefill_s, "time/draft_s": stats.draft_s,
        "time/verify_s": stats.verify_s, "time/overhead_s": stats.overhead_s,
    }  # fmt: skip
    if turns := [len(item.rollout.turn_reward_K) for item in scored if item.rollout.turn_reward_K is not None]:
        metrics["episode/turns"] = np.mean(turns)
    for name in names:
        parts = [item.part[name] for item in scored if item.part[name] is not None]
        if parts:
            metrics[f"reward/part/{name}"] = np.mean(np.array(parts, float))
    if made.plain is not None:
        # by token: completions of the two modes that are not exact are of other lengths
        metrics["rollout/speedup"] = stats.tokens_per_s / made.plain.tokens_per_s
        metrics["time/compare_s"] = made.plain.wall_s
    if own.tokens:
        metrics |= {"rollout/surprise": own.mean, "rollout/surprise_square": own.square / own.tokens}
    if made.identical is not None:
        metrics["rollout/tokens_identical"] = float(made.identical)
    if weights := [rollout.weight_T for rollout in made.rollout_R if rollout.weight_T is not None]:
        metrics["rollout/weight_mean"] = np.concatenate(weights).mean()
        metrics["rollout/weight_max"] = max(map(np.max, weights))
    return {name: float(value) for name, value in metrics.items()}


def evaluation(stages: Stages, step: int, final: bool) -> dict[str, float]:
    """The policy on the held-out rows, those of a run's two ends when `final`; nothing where none are to be asked."""
    wanted = stages.config.eval.final_items if final else stages.config.eval.items
    prompts = stages.task.held_out[: wanted or None] if final or wanted else ()
    if not prompts:
        return {}
    result = evaluate(stages, prompts)
    stages.view.say(
        f"step {step}: held-out accuracy {100 * result.accuracy:.1f} % ± {100 * result.standard_error:.1f} of {result.items} items"
    )
    return {
        "eval/accuracy": result.accuracy, "eval/se": result.standard_error, "eval/length": result.mean_length,
        "eval/entropy": result.mean_entropy, "eval/items": float(result.items), "time/eval_s": result.wall_s,
    }  # fmt: skip
