"""The whole way of a run on one page: task -> rollouts -> rewards -> advantages -> update -> weights, and what is recorded of it.

prompts ─▶ engine ─▶ score ─▶ advantages ─▶ learner ─▶ the weight door ─▶ engine
              ▲ drafts                        every step: metrics, rollouts; every few: evaluation, checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from respec.config import Config
from respec.errors import ConfigError
from respec.models.load import Policy, load_policy
from respec.online import OnlineLearner, online_learner, share_of
from respec.policy.advantages import advantages
from respec.policy.learner import PolicyLearner
from respec.policy.presets import resolve
from respec.policy.warmup import warm_up
from respec.report.delete import delete_run
from respec.report.html import write_report
from respec.report.live import View
from respec.report.metrics import checked
from respec.report.pieces import token_pieces
from respec.report.run_dir import RunDir
from respec.report.summary import summarize, tokens_so_far
from respec.report.surprise import Surprise, recorded, surprise
from respec.stages import (
    Stages,
    asks_of_step,
    build,
    decisions_of,
    estimate_idle,
    evaluate,
    fallbacks,
    generate,
    keep_controller,
    learn_histories,
    remember,
    to_know,
)
from respec.tasks.reward import RewardWorker
from respec.tasks.task import Task, load_task
from respec.types import Ask, Rollout, RolloutStats, RoundRecord, ScoredRollout, UpdateStats
from respec.weights.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from respec.weights.swap import swap

SHOWN_ROLLOUTS = 4


@dataclass(frozen=True)
class Generated:
    """One step's rollouts, and what a comparison with plain decoding showed (None when there was none, or none is promised to be equal)."""

    rollout_R: tuple[Rollout, ...]
    stats: RolloutStats
    plain: RolloutStats | None
    identical: bool | None


def train(config: Config, view: View, stop: Callable[[], bool], fresh: bool = False) -> dict[str, Any]:
    """Runs, or goes on with, the run of `config.run.dir`; returns its summary, which is also in summary.json.

    `stop` is asked after every step: True ends the run there, with a checkpoint. `fresh` deletes the folder first. Raises a
    RespecError for anything that is the user's to mend, before work is lost.
    """
    began = time.perf_counter()
    if fresh:
        delete_run(config.run.dir)
    with RunDir(config) as run:
        config = run.config
        torch.set_num_threads(config.run.threads)
        policy = load_policy(config.model)
        resolve(config.policy)
        task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
        if config.rollout.group_size < 2:
            raise ConfigError(
                "rollout.group_size: a group of one has nothing to be compared with; use 2 or more (got 1)"
            )
        with RewardWorker(task, config.task.reward) as reward:
            for note in (*run.notes, *to_know(config, task)):
                view.say(note)
            learner = PolicyLearner(policy, config.policy, config.run.steps, config.rollout.max_new_tokens)
            checkpoint = latest_checkpoint(run.path, view.say)
            step, earlier_s, drafter_state = _resume(run, checkpoint, policy, learner, view)
            if checkpoint is None:
                _warm_up(config, policy, task, view)
                _save(run, policy, learner, None, 0, view)
            stages = build(config, policy, task, reward, view, version=step)
            remember(stages, run)
            online = online_learner(config, policy, stages.engine, stages.planner, view.say, drafter_state)
            if run.last_step is None:
                _record_start(stages, run)
            tokens = tokens_so_far(run.read_metrics())
            seen = sum((recorded(past.metrics) for past in run.read_metrics()), Surprise())
            saved_at, finished = time.monotonic(), step >= config.run.steps
            while not finished and not stop():
                step += 1
                metrics, scored, rounds = _step(stages, learner, online, step, tokens)
                tokens = metrics["tokens/total"]
                finished = step == config.run.steps
                if finished or _every(config.eval.every, step):
                    metrics |= _evaluation(stages, step, final=finished)
                metrics["time/step_s"] += metrics.get("time/eval_s", 0.0)
                pieces = [token_pieces(policy.tokenizer, s.rollout.token_T.tolist()) for s in scored[:SHOWN_ROLLOUTS]]
                run.write_step(step, checked(metrics), scored, rounds, pieces, decisions_of(stages.planner))
                view.step(step, metrics)
                before, seen = seen, seen + recorded(metrics)
                for line in (*fallbacks(scored), *(seen.news(before) if config.speculation.mode != "lossy" else ())):
                    view.say(line)
                minutes = (time.monotonic() - saved_at) / 60
                due = _every(config.checkpoint.every_steps, step) or 0 < config.checkpoint.every_minutes <= minutes
                if finished or due or stop():
                    _save(run, policy, learner, online, step, view)
                    keep_controller(stages, run)
                    saved_at = time.monotonic()
            view.phase("report")
            wall_s = earlier_s + time.perf_counter() - began
            summary = summarize(run.read_metrics(), config.run.steps, wall_s, run.path)
            run.write_summary(summary)
            write_report(run.path)
    return summary


def _step(
    stages: Stages, learner: PolicyLearner, online: OnlineLearner | None, step: int, tokens_before: float
) -> tuple[dict[str, float], tuple[ScoredRollout, ...], tuple[RoundRecord, ...]]:
    """One RL step; the order of the stages is the picture at the top."""
    config, view, began = stages.config, stages.view, time.perf_counter()
    asks = asks_of_step(stages.task.train, config, step)
    made = _rollouts(stages, asks, step)
    scored_at = time.perf_counter()
    view.phase("reward")
    scored = stages.reward.score(made.rollout_R)
    reward_s = time.perf_counter() - scored_at
    view.phase("training", len(scored))
    samples = advantages(scored, resolve(config.policy).estimator)
    watch = online.watch(samples, step) if online is not None else None
    update = learner.update(samples, config.rollout.temperature, lambda done, _: view.advance(done), watch)
    distilled = online.update(watch, step) if online is not None and watch is not None else {}
    swapped_at = time.perf_counter()
    estimate_idle(stages, made.rollout_R, made.stats, online.agreement if online is not None else {})
    swap(stages.engine, stages.policy, config.model.dtype, version=step)
    learn_histories(stages.engine, made.rollout_R)
    ended = time.perf_counter()
    own = surprise(made.rollout_R, config.rollout.sampling())
    metrics = _metrics(made, scored, update, stages.reward.names, own) | distilled | share_of(distilled, ended - began) | {
        "time/reward_s": reward_s, "time/weights_s": ended - swapped_at, "time/step_s": ended - began,
        "time/training_s": update.wall_s - (watch.wall_s if watch is not None else 0.0),
        "tokens/total": tokens_before + made.stats.tokens, "drafter/alarms": float(len(stages.planner.take_alarms())),
    }  # fmt: skip
    return metrics, scored, made.stats.round_R


def _rollouts(stages: Stages, asks: Sequence[Ask], step: int) -> Generated:
    """The step's rollouts; on comparison steps, once more by plain decoding, first or second in turn.

    Fair by construction: drafts come from histories that are added to only after both passes, so neither sees the other's output.
    """
    config = stages.config
    sampling = config.rollout.sampling()
    compare = config.speculation.drafter != "off" and _every(config.run.compare_plain_every, step)
    plain_first = compare and (step // config.run.compare_plain_every) % 2 == 0
    plain = generate(stages, asks, sampling, "comparison", plain=True) if plain_first else None
    rollouts, stats = generate(stages, asks, sampling, "generation")
    if compare and not plain_first:
        plain = generate(stages, asks, sampling, "comparison", plain=True)
    if plain is None:
        return Generated(rollouts, stats, None, None)
    same = all(
        np.array_equal(a.token_T, b.token_T) and np.array_equal(a.logprob_T, b.logprob_T)
        for a, b in zip(rollouts, plain[0], strict=True)
    )
    return Generated(rollouts, stats, plain[1], same if config.speculation.mode == "matching" else None)


def _metrics(
    made: Generated, scored: Sequence[ScoredRollout], update: UpdateStats, names: Sequence[str], own: Surprise
) -> dict[str, float]:
    stats, rewards = made.stats, np.array([item.reward for item in scored])
    lengths = np.array([len(item.rollout.token_T) for item in scored])
    groups = [np.array([s.reward for s in g]) for _, g in groupby(scored, key=lambda s: s.rollout.key[:2])]
    metrics = {
        "reward/mean": rewards.mean(), "reward/std": rewards.std(),
        "reward/fell_back": sum(bool(item.fell_back) for item in scored),
        "length/mean": lengths.mean(), "length/max": lengths.max(),
        "length/truncated_share": np.mean([item.rollout.truncated for item in scored]),
        "group/no_spread_share": np.mean([np.ptp(group) == 0 for group in groups]),
        "policy/loss": update.loss, "policy/entropy": update.entropy, "policy/clip_fraction": update.clip_fraction,
        "policy/grad_norm": update.grad_norm, "policy/lr": update.lr, "policy/ratio_mean": update.ratio_mean,
        "policy/mismatch_mean": update.mismatch_mean, "policy/mismatch_max": update.mismatch_max,
        "policy/tokens": update.tokens, "policy/minibatches": update.minibatches,
        "rollout/tokens_per_s": stats.tokens_per_s, "rollout/accepted_length": stats.accepted_length,
        "rollout/draft_acceptance": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "rollout/entropy": np.concatenate([item.rollout.entropy_T for item in scored]).mean(),
        "rollout/tokens": stats.tokens, "rollout/prompt_tokens": stats.prompt_tokens, "rollout/rounds": len(stats.round_R),
        "time/generation_s": stats.wall_s, "time/prefill_s": stats.prefill_s, "time/draft_s": stats.draft_s,
        "time/verify_s": stats.verify_s, "time/overhead_s": stats.overhead_s,
    }  # fmt: skip
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


def _evaluation(stages: Stages, step: int, final: bool) -> dict[str, float]:
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


def _resume(
    run: RunDir, checkpoint: Checkpoint | None, policy: Policy, learner: PolicyLearner, view: View
) -> tuple[int, float, Mapping[str, Any] | None]:
    """Puts the run back to its last checkpoint; returns its step, the seconds spent until then and the drafter learner's state."""
    if checkpoint is None:
        if run.last_step is not None:
            view.say("no checkpoint was written before the last stop: the run begins again")
        run.cut_back(-1)
        return 0, 0.0, None
    state = load_checkpoint(checkpoint, policy)
    learner.load_state_dict(state)
    last = run.last_step if run.last_step is not None else checkpoint.step
    run.cut_back(checkpoint.step)
    lost = (
        f"; steps {checkpoint.step + 1} to {last} are generated again, to the same tokens"
        if last > checkpoint.step
        else ""
    )
    view.say(f"going on from step {checkpoint.step} of '{run.path}'{lost}")
    for record in run.read_metrics():
        view.step(record.step, record.metrics, past=True)
    spent_s = sum(record.metrics.get("time/step_s", 0.0) for record in run.read_metrics())
    return checkpoint.step, spent_s, state.get("drafter")


def _warm_up(config: Config, policy: Policy, task: Task, view: View) -> None:
    """Supervised learning on worked solutions, when the configuration asks for it."""
    if not config.warmup.steps:
        return
    pairs = task.worked(config.warmup.train_size)
    view.phase("warm-up", config.warmup.steps)
    stats = warm_up(
        policy, pairs, config.warmup, config.run.seed, lambda done, loss: view.advance(done, f"loss {loss:.3f}")
    )
    view.say(f"warm-up: {stats.steps} steps on worked solutions, loss {stats.first_loss:.3f} -> {stats.last_loss:.3f}")
    if config.warmup.save_to is not None:
        policy.model.save_pretrained(config.warmup.save_to)
        policy.tokenizer.save_pretrained(config.warmup.save_to)
        view.say(f"the warmed-up policy is in '{config.warmup.save_to}'")


def _record_start(stages: Stages, run: RunDir) -> None:
    """Step 0: the policy before RL, evaluated."""
    began = time.perf_counter()
    metrics = _evaluation(stages, 0, final=True)
    metrics |= {"time/step_s": time.perf_counter() - began, "tokens/total": 0.0}
    run.write_step(0, checked(metrics))
    stages.view.step(0, metrics)


def _save(
    run: RunDir, policy: Policy, learner: PolicyLearner, online: OnlineLearner | None, step: int, view: View
) -> None:
    view.phase("checkpoint")
    state = {**learner.state_dict(), **({"drafter": online.state_dict()} if online is not None else {})}
    save_checkpoint(run.path, step, policy, state, {"step": step}, run.config.checkpoint.keep)
    if online is not None:
        online.save(run)


def _every(k: int, step: int) -> bool:
    return k > 0 and step % k == 0
