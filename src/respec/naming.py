"""What a step and an evaluation did, under the names that report/metrics.py explains: the loop's numbers, and nobody else's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from respec.report.echo import repetition
from respec.report.metrics import checked
from respec.report.surprise import Surprise
from respec.stages import Stages, evaluate
from respec.tasks.order import Order
from respec.types import PLAIN, CriticStats, Rollout, RolloutStats, ScoredRollout, UpdateStats


@dataclass(frozen=True)
class Generated:
    """A draw's rollouts in canonical order, scored, and what a comparison with plain decoding showed (None when there was none, or none
    is promised to be equal). Draws of one step add up."""

    scored_R: tuple[ScoredRollout, ...]
    stats: RolloutStats
    plain: RolloutStats | None
    identical: bool | None
    reward_s: float = 0.0

    @property
    def rollout_R(self) -> tuple[Rollout, ...]:
        return tuple(item.rollout for item in self.scored_R)

    def __add__(self, other: Generated) -> Generated:
        later = [_shifted(item, len(self.stats.round_R)) for item in other.scored_R]
        return Generated(
            tuple(sorted((*self.scored_R, *later), key=lambda item: item.rollout.key)),
            self.stats + other.stats,
            self.plain + other.plain if self.plain is not None and other.plain is not None else None,
            self.identical and other.identical,
            self.reward_s + other.reward_s,
        )


def _shifted(item: ScoredRollout, rounds: int) -> ScoredRollout:
    """The rollout as drawn after so many other rounds of its step."""
    rollout = dataclasses.replace(item.rollout, round_T=item.rollout.round_T + np.int32(rounds))
    return dataclasses.replace(item, rollout=rollout)


@dataclass(frozen=True)
class Supplied:
    """What became of a step's groups on the way to its samples. Tokens: carried from earlier steps, left for later ones, expired."""

    draws: int = 0
    groups: int = 0
    dropped_groups: int = 0
    dropped_tokens: int = 0
    carried_tokens: int = 0
    left_tokens: int = 0
    expired_tokens: int = 0


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
        "policy/loss": update.loss, "policy/entropy": update.entropy, "policy/clip_fraction": update.clip_fraction,
        "policy/grad_norm": update.grad_norm, "policy/lr": update.lr, "policy/ratio_mean": update.ratio_mean,
        "policy/mismatch_mean": update.mismatch_mean, "policy/mismatch_max": update.mismatch_max,
        "policy/tokens": update.tokens, "policy/minibatches": update.minibatches,
        "rollout/entropy": np.concatenate([item.rollout.entropy_T[item.rollout.drawn_T] for item in scored]).mean(),
        **drawing(stats),
    }  # fmt: skip
    if any(len(group) > 1 for group in groups):
        metrics["group/no_spread_share"] = np.mean([np.ptp(group) == 0 for group in groups])
    if turns := [len(item.rollout.turn_reward_K) for item in scored if item.rollout.turn_reward_K is not None]:
        metrics["episode/turns"] = np.mean(turns)
    for name in dict.fromkeys((*names, *(name for item in scored for name in item.part))):
        parts = [item.part[name] for item in scored if item.part.get(name) is not None]
        if parts:
            metrics[f"reward/part/{name}"] = np.mean(np.array(parts, float))
    for task in dict.fromkeys(item.rollout.prompt.task for item in scored if item.rollout.prompt.task):
        metrics[f"reward/task/{task}"] = np.mean([s.reward for s in scored if s.rollout.prompt.task == task])
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


def drawing(stats: RolloutStats) -> dict[str, float]:
    """What drawing completions took, and what drafts were worth in it."""
    return {
        "rollout/tokens_per_s": stats.tokens_per_s, "rollout/accepted_length": stats.accepted_length,
        "rollout/draft_acceptance": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "rollout/tokens": stats.tokens, "rollout/prompt_tokens": stats.prompt_tokens, "rollout/rounds": len(stats.round_R),
        "time/generation_s": stats.wall_s, "time/prefill_s": stats.prefill_s, "time/draft_s": stats.draft_s,
        "time/verify_s": stats.verify_s, "time/overhead_s": stats.overhead_s,
    }  # fmt: skip


def planned(stats: RolloutStats, drafters: Iterable[str]) -> dict[str, float]:
    """By drafter, plain decoding among them, the share of decode rounds that were its own."""
    plans = [record.plan.drafter if record.plan.n else PLAIN.drafter for record in stats.round_R]
    return {f"plan/{name}": plans.count(name) / max(1, len(plans)) for name in (PLAIN.drafter, *drafters)}


def elsewhere(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same metrics under names that keep them apart in another trainer's log."""
    return {f"respec/{name}": value for name, value in checked(metrics).items()}


# Of the terms beside the surrogate, and of the frozen models that they ask.
TERMS = {
    "kl": "policy/kl", "entropy_bonus": "policy/entropy_bonus", "reverse_kl": "distill/reverse_kl",
    "forward_kl": "distill/forward_kl", "jsd": "distill/jsd",
}  # fmt: skip


def of_terms(*found: Mapping[str, float]) -> dict[str, float]:
    """Means of the terms beside the surrogate, from wherever they were computed, and the time that frozen models took; nothing without any."""
    metrics = {TERMS[name]: value for said in found for name, value in said.items() if name in TERMS}
    asked = [said["asked_s"] for said in found if "asked_s" in said]
    return metrics | ({"time/reference_s": sum(asked)} if asked else {})


def fallen(metrics: Mapping[str, float], before: float, floor: float) -> list[str]:
    """A line when the policy's entropy has come to lie below `floor` since the step before; none at a floor of 0."""
    entropy = metrics["policy/entropy"]
    if not entropy < floor <= before:
        return []
    return [
        f"the policy's entropy has fallen to {entropy:.3f} nats a token, under policy.entropy_floor ({floor}): it explores little by now. "
        "Raise policy.entropy_bonus or policy.clip_high, hold it to a reference, or lower policy.lr"
    ]


def supplied(counts: Supplied | None) -> dict[str, float]:
    """What filters and a budget of tokens did in a step, as metrics; none of a run without either."""
    if counts is None:
        return {}
    return {
        "collect/draws": float(counts.draws), "collect/groups": float(counts.groups),
        "collect/dropped_groups": float(counts.dropped_groups), "collect/dropped_tokens": float(counts.dropped_tokens),
        "collect/carried_tokens": float(counts.carried_tokens), "collect/left_tokens": float(counts.left_tokens),
        "collect/expired_tokens": float(counts.expired_tokens),
    }  # fmt: skip


def criticism(stats: CriticStats) -> dict[str, float]:
    """What the critic expected and learned in a step."""
    metrics = {
        "critic/loss": stats.loss, "critic/clip_fraction": stats.clip_fraction, "critic/value_mean": stats.value_mean,
        "critic/return_mean": stats.return_mean, "critic/grad_norm": stats.grad_norm, "critic/lr": stats.lr, "time/critic_s": stats.wall_s,
    }  # fmt: skip
    if stats.explained_variance is not None:
        metrics["critic/explained_variance"] = stats.explained_variance
    return metrics


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
        **{f"eval/task/{name}": accuracy for name, accuracy in result.task_accuracy.items()},
    }  # fmt: skip


def data_metrics(order: Order) -> dict[str, float]:
    """What measured difficulty has made of the order; nothing where it is not asked for."""
    if order.difficulty is None:
        return {}
    return {"data/passed_over": float(order.difficulty.passed_over), "data/in_band_share": order.difficulty.in_band()}


def share_of(metrics: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The drafter's learner's share of a step of `step_s` seconds, as a metric; none where nothing was learned."""
    return {"drafter/share": metrics["time/drafter_s"] / step_s} if "time/drafter_s" in metrics else {}
