"""The whole way of a run on one page: task -> rollouts -> rewards -> advantages -> update -> weights, and what is recorded of it.

prompts ─▶ engine ─▶ score ─▶ advantages ─▶ learner ─▶ the weight door ─▶ engine
              ▲ drafts                        every step: metrics, rollouts; every few: evaluation, checkpoint
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from respec.anchors import Anchors
from respec.config import Config
from respec.errors import ConfigError
from respec.models.load import load_policy
from respec.naming import (
    Generated,
    criticism,
    data_metrics,
    evaluation,
    fallen,
    metrics_of,
    of_terms,
    share_of,
    supplied,
)
from respec.online import OnlineLearner, online_learner
from respec.policy.adapters import choose_trained
from respec.policy.advantages import advantages
from respec.policy.critic_learner import CriticLearner, critic_learner
from respec.policy.estimators import GROUP_RELATIVE
from respec.policy.learner import PolicyLearner
from respec.policy.presets import resolve
from respec.remote import mismatch_news, worker_of
from respec.report.delete import delete_run
from respec.report.echo import echo_trap
from respec.report.html import write_report
from respec.report.live import View
from respec.report.metrics import checked
from respec.report.pieces import token_pieces
from respec.report.run_dir import RunDir
from respec.report.said import keeping
from respec.report.summary import summarize, tokens_so_far
from respec.report.surprise import Surprise, recorded, surprise
from respec.report.tracking import refuse_missing, tracked
from respec.resume import Part, begin, record_start, save, take_up
from respec.stages import (
    Stages,
    answerless,
    build,
    decisions_of,
    estimate_idle,
    fallbacks,
    generate,
    keep_controller,
    learn_histories,
    remember,
    rest,
    to_know,
)
from respec.supply import Supply
from respec.tasks.mixed_reward import reward_of
from respec.tasks.order import order_of
from respec.tasks.task import load_task
from respec.types import Ask, RoundRecord, ScoredRollout
from respec.weights.behind import Behind
from respec.weights.checkpoint import latest_checkpoint
from respec.weights.swap import swap

SHOWN_ROLLOUTS = 4


@dataclass(frozen=True)
class Learning:
    """What of a run learns, and what it is given to learn from."""

    learner: PolicyLearner
    supply: Supply
    anchors: Anchors
    critic: CriticLearner | None
    online: OnlineLearner | None
    behind: Behind

    @property
    def parts(self) -> dict[str, Part | None]:
        """What goes into a checkpoint beside the policy and its learner."""
        return {"supply": self.supply, "critic": self.critic, "drafter": self.online, "behind": self.behind}


def train(config: Config, view: View, stop: Callable[[], bool], fresh: bool = False) -> dict[str, Any]:
    """Runs, or goes on with, the run of `config.run.dir`; returns its summary, which is also in summary.json.

    `stop` is asked after every step: True ends the run there, with a checkpoint. `fresh` deletes the folder first. Raises a
    RespecError for anything that is the user's to mend, before work is lost.
    """
    began = time.perf_counter()
    refuse_missing(config.tracking)
    if fresh:
        delete_run(config.run.dir)
    with RunDir(config) as run, keeping(run.path, view) as view, tracked(run.path, run.config, view.say):
        config = run.config
        torch.set_num_threads(config.run.threads)
        policy = load_policy(config.model)
        algorithm = resolve(config.policy)
        choose_trained(policy.model, config.policy, config.run.seed)
        task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
        if config.rollout.group_size < 2 and algorithm.estimator in GROUP_RELATIVE:
            raise ConfigError(
                f"rollout.group_size: a group of one has nothing to be compared with, as estimator '{algorithm.estimator}' does; use 2 or more (got 1)"
            )
        with reward_of(task, config.task) as reward, worker_of(config) as worker:
            anchors = Anchors(config, policy, task.train)
            for note in (*run.notes, *to_know(config, task), *anchors.notes):
                view.say(note)
            learner = PolicyLearner(
                policy, config.policy, config.run.steps, config.rollout.max_new_tokens, anchors.terms
            )
            supply = Supply(config, order_of(task, config), view.say)
            checkpoint = latest_checkpoint(run.path, view.say)
            step, earlier_s, state = take_up(run, checkpoint, policy, learner, supply, view)
            if checkpoint is None:
                begin(config, policy, task, view)
            anchors.settle(run.path, step)
            critic = critic_learner(config, policy, state.get("critic"))
            if checkpoint is None:
                save(run, policy, learner, {"supply": supply, "critic": critic}, 0, view)
            behind = Behind(config.rollout.sync_every, state.get("behind", {}))
            with behind.lent(policy, step) as version:
                stages = build(config, policy, task, reward, view, version, worker)
            remember(stages, run)
            stages.planner.load_state_dict(state.get("sentinel", {}))
            online = online_learner(config, policy, stages.engine, stages.planner, view.say, state.get("drafter"))
            learning = Learning(learner, supply, anchors, critic, online, behind)
            if run.last_step is None:
                record_start(stages, run)
            tokens, entropy = tokens_so_far(run.read_metrics()), math.inf
            history = [past.metrics for past in run.read_metrics() if past.step]
            seen = sum((recorded(past.metrics) for past in run.read_metrics()), Surprise())
            saved_at, finished = time.monotonic(), step >= config.run.steps
            while not finished and not stop():
                step += 1
                metrics, scored, rounds = _step(stages, learning, step, tokens)
                tokens = metrics["tokens/total"]
                finished = step == config.run.steps
                if finished or _every(config.eval.every, step):
                    metrics |= evaluation(stages, step, final=finished)
                metrics["time/step_s"] += metrics.get("time/eval_s", 0.0)
                pieces = [token_pieces(policy.tokenizer, s.rollout.token_T.tolist()) for s in scored[:SHOWN_ROLLOUTS]]
                run.write_step(step, checked(metrics), scored, rounds, pieces, decisions_of(stages.planner))
                view.step(step, metrics)
                before, seen = seen, seen + recorded(metrics)
                history.append(metrics)
                news = seen.news(before) if config.speculation.mode != "lossy" else ()
                floor = fallen(metrics, entropy, config.policy.entropy_floor)
                strange = mismatch_news(metrics, config)
                for line in (
                    *fallbacks(scored),
                    *answerless(task, scored),
                    *news,
                    *floor,
                    *strange,
                    *echo_trap(history),
                ):
                    view.say(line)
                entropy = metrics["policy/entropy"]
                minutes = (time.monotonic() - saved_at) / 60
                due = _every(config.checkpoint.every_steps, step) or 0 < config.checkpoint.every_minutes <= minutes
                if finished or due or stop():
                    anchors.keep(run.path)
                    save(run, policy, learner, learning.parts | {"sentinel": stages.planner}, step, view)
                    if online is not None:
                        online.save(run.path)
                    keep_controller(stages, run)
                    saved_at = time.monotonic()
            view.phase("report")
            wall_s = earlier_s + time.perf_counter() - began
            summary = summarize(run.read_metrics(), config.run.steps, wall_s, run.path)
            run.write_summary(summary)
            write_report(run.path)
    return summary


def _step(
    stages: Stages, learning: Learning, step: int, tokens_before: float
) -> tuple[dict[str, float], tuple[ScoredRollout, ...], tuple[RoundRecord, ...]]:
    """One RL step; the order of the stages is the picture at the top."""
    config, view, began = stages.config, stages.view, time.perf_counter()
    learner, supply, anchors = learning.learner, learning.supply, learning.anchors
    critic, online, behind = learning.critic, learning.online, learning.behind
    drawn = supply.draw(lambda asks: _rollouts(stages, asks, step))
    made, scored = drawn.made, drawn.made.scored_R
    kept, held = anchors.charge(drawn.kept)
    samples = supply.spend(advantages(kept, resolve(config.policy).estimator, critic), drawn, step)
    samples, taught = anchors.teach(samples)
    rest(stages.engine, behind.due(step, config.run.steps))
    view.phase("training", len(samples))
    watch = online.watch(samples, step) if online is not None else None
    update = learner.update(samples, config.rollout.temperature, lambda done, _: view.advance(done), watch)
    criticized = criticism(critic.update(samples)) if critic is not None else {}
    anchors.move(step)
    distilled = online.update(watch, step) if online is not None and watch is not None else {}
    swapped_at = time.perf_counter()
    agreed = online.agreement if online is not None else {}
    estimate_idle(stages.planner, stages.engine, config.speculation, made.rollout_R, made.stats, agreed)
    if behind.due(step, config.run.steps):
        swap(stages.engine, stages.policy, config.model.dtype, version=step)
        behind.keep(stages.policy, step)
    learn_histories(stages.engine, made.rollout_R)
    ended = time.perf_counter()
    own = surprise(made.rollout_R, config.rollout.sampling())
    metrics = (
        metrics_of(made, scored, update, stages.reward.names, own) | of_terms(update.term, held, taught) | criticized
    )
    metrics |= distilled | share_of(distilled, ended - began) | supplied(supply.counts) | data_metrics(supply.order) | {
        "time/reward_s": made.reward_s, "time/weights_s": ended - swapped_at, "time/step_s": ended - began,
        "time/training_s": update.wall_s - (watch.wall_s if watch is not None else 0.0),
        "tokens/total": tokens_before + made.stats.tokens, "drafter/alarms": float(len(stages.planner.take_alarms())),
    }  # fmt: skip
    return metrics, scored, made.stats.round_R


def _rollouts(stages: Stages, asks: Sequence[Ask], step: int) -> Generated:
    """The rollouts of a step's draw, scored; on comparison steps, once more by plain decoding, first or second in turn.

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
    scored_at = time.perf_counter()
    stages.view.phase("reward")
    scored = stages.reward.score(rollouts)
    reward_s = time.perf_counter() - scored_at
    if plain is None:
        return Generated(scored, stats, None, None, reward_s)
    same = all(
        np.array_equal(a.token_T, b.token_T) and np.array_equal(a.logprob_T, b.logprob_T)
        for a, b in zip(rollouts, plain[0], strict=True)
    )
    promised = config.speculation.mode == "matching" and config.rollout.engine == "native"
    return Generated(scored, stats, plain[1], same if promised else None, reward_s)


def _every(k: int, step: int) -> bool:
    return k > 0 and step % k == 0
