"""A run begun, taken up where it was left, and saved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from respec.config import Config
from respec.entropy import probe, warnings
from respec.models.load import Policy
from respec.naming import evaluation
from respec.policy.learner import PolicyLearner
from respec.policy.warmup import warm_up
from respec.report.live import View
from respec.report.metrics import checked
from respec.report.run_dir import RunDir
from respec.stages import Stages
from respec.supply import Supply
from respec.tasks.task import Task
from respec.weights.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from respec.weights.export import export_adapter, save_model


class Part(Protocol):
    """Something of a run that a checkpoint keeps: numbers and tensors."""

    def state_dict(self) -> dict[str, Any]: ...


def repeats(config: Config) -> bool:
    """Whether a run that goes on draws the tokens that it drew before: not promised by vLLM, nor where timings choose who drafts and drafts choose tokens."""
    timed = config.speculation.drafter == "auto" and config.speculation.mode == "rejection"
    return config.rollout.engine == "native" and not timed


def take_up(
    run: RunDir, checkpoint: Checkpoint | None, policy: Policy, learner: PolicyLearner, supply: Supply, view: View
) -> tuple[int, float, Mapping[str, Any]]:
    """Puts the run back to its last checkpoint; returns its step, the seconds spent until then and the states of what else learns, none for a
    run that begins."""
    if checkpoint is None:
        if run.last_step is not None:
            view.say("no checkpoint was written before the last stop: the run begins again")
        run.cut_back(-1)
        return 0, 0.0, {}
    state = load_checkpoint(checkpoint, policy)
    learner.load_state_dict(state)
    supply.load_state_dict(state.get("supply", {}), checkpoint.step)
    last = run.last_step if run.last_step is not None else checkpoint.step
    run.cut_back(checkpoint.step)
    again = f"; steps {checkpoint.step + 1} to {last} are generated again{', to the same tokens' if repeats(run.config) else ''}"
    lost = again if last > checkpoint.step else ""
    view.say(f"going on from step {checkpoint.step} of '{run.path}'{lost}")
    for record in run.read_metrics():
        view.step(record.step, record.metrics, past=True)
    spent_s = sum(record.metrics.get("time/step_s", 0.0) for record in run.read_metrics())
    return checkpoint.step, spent_s, state


def begin(config: Config, policy: Policy, task: Task, view: View) -> None:
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
        save_model(policy, config.warmup.save_to)
        view.say(f"the warmed-up policy is in '{config.warmup.save_to}'")


def record_start(stages: Stages, run: RunDir) -> None:
    """Step 0: the policy before RL, evaluated."""
    began = time.perf_counter()
    metrics = evaluation(stages, 0, final=True)
    if (probed := probe(stages)) is not None:
        metrics["warmup/entropy"] = probed.mean_entropy
        for line in warnings("the warmed-up policy", probed, stages.config.warmup.entropy_floor):
            stages.view.say(line)
    metrics |= {"time/step_s": time.perf_counter() - began, "tokens/total": 0.0}
    run.write_step(0, checked(metrics))
    stages.view.step(0, metrics)


def save(
    run: RunDir,
    policy: Policy,
    learner: PolicyLearner,
    parts: Mapping[str, Part | None],
    step: int,
    view: View,
) -> None:
    """A checkpoint of the policy, its learner and the `parts`, by the names their states are taken up under."""
    view.phase("checkpoint")
    state = {**learner.state_dict(), **{name: part.state_dict() for name, part in parts.items() if part is not None}}
    save_checkpoint(run.path, step, policy, state, {"step": step}, run.config.checkpoint.keep)
    if step == run.config.run.steps:
        export_adapter(policy, run.path)
