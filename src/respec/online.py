"""The online learner: the EAGLE-3 head learns from the rollouts that each step has just drawn, and so follows the policy (ReSpec, section 4.2).

What it learns from is seen in the policy learner's own forward pass and has no gradient: the policy's stay bit for bit what they would be
without it. The laws it learns are of the policy that drew the rollouts, one update older than the one it will draft for next.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from respec.config import Config, DrafterConfig, RolloutConfig
from respec.drafter.agreement import Agreement, together, write_agreement
from respec.drafter.beside import Beside
from respec.drafter.examples import Example
from respec.drafter.judge import Judgement, judge
from respec.drafter.learner import DrafterLearner, LearnerSettings
from respec.drafter.replay import Replay
from respec.drafter.schedule import Gate, rate
from respec.drafter.watcher import Watcher
from respec.drafter.weighting import weigh
from respec.models.eagle import EagleHead, check_fits, load_head, save_head
from respec.models.load import Policy
from respec.report.run_dir import RunDir
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.types import Mode, Sample

FOLDER = "drafter"

Learned = tuple[dict[str, float], Judgement, Mapping[Mode, Agreement]]
"""What an update gives: metrics, how the head stood to its first mini-batch before, and how far drafts would have stood on all."""


class OnlineLearner:
    """Teaches the head of an engine's `eagle` drafter, in step with the policy. The head in the making is float32; what drafts is a
    snapshot of it, which enters by the sentinel's door, between two rollouts.

    A step is `watch`, for the policy's update to be looked at, and `update`. With `async_steps` 1 an update begun in one step runs beside
    the next one's generation and is adopted in that one's `update`: drafts are then by a head one update older.
    `steps` (RL steps) spans the learning-rate schedule.
    """

    def __init__(
        self,
        config: DrafterConfig,
        rollout: RolloutConfig,
        head: EagleHead,
        drafter: EagleDrafter,
        door: Sentinel,
        steps: int,
    ) -> None:
        self._config, self._sampling, self._steps = config, rollout.sampling(), steps
        self._drafter, self._door = drafter, door
        self._settings = LearnerSettings(
            loss=config.loss,
            lr=config.lr,
            depths=config.depths,
            grad_clip=config.grad_clip,
            temperature=rollout.temperature or 1.0,
        )
        self._learner = DrafterLearner(head, self._settings)
        self._replay = Replay(config.replay_mb, config.replay)
        self._gate = Gate(config.gate)
        self._beside = Beside(config.threads, head.lm_head.weight.device) if config.async_steps else None
        self._running: tuple[Future[Learned], int] | None = None
        self._alike = False
        # how far drafts would have stood on the rollouts of the last update, by mode; empty on a step without one
        self.agreement: Mapping[Mode, Agreement] = {}

    @property
    def head(self) -> EagleHead:
        """The head in the making."""
        return self._learner.head

    def watch(self, samples: Sequence[Sample], step: int) -> Watcher:
        """What is to look on at the policy's update on these samples: at a choice of them that depends on the step alone."""
        wanted = math.ceil(len(samples) * self._config.share / self._config.every)
        chosen = [samples[i] for i in sorted(np.random.default_rng(step).permutation(len(samples))[:wanted])]
        rewards = np.array([sample.scored.reward for sample in chosen])
        spread = np.array([float(sample.advantage_T[0]) if len(sample.advantage_T) else 0.0 for sample in chosen])
        weights, self._alike = weigh(self._config.weighting, rewards, self._config.reward_min, spread)
        keys = [sample.scored.rollout.key for sample in chosen]
        stored = getattr(torch, self._config.features)
        return Watcher(
            self.head.shape.taps, self._sampling, dict(zip(keys, weights.tolist(), strict=True)), step - 1, stored
        )

    def update(self, watch: Watcher, step: int) -> dict[str, float]:
        """Adopts the update that ran beside, if one did, and begins the next where one is due; what was done and seen, as metrics.

        Raises NonFiniteError, with the head as it was.
        """
        began = time.perf_counter()
        age = step - 1 - self._drafter.learned_from
        self.agreement = {}
        metrics, examples = self._adopt(), watch.examples
        lost = self._replay.add(examples)
        due = step % self._config.every == 0
        opened = due and bool(examples)
        if opened and self._judges_first:
            seen = self._judge(examples)
            drift = self._gate.drift(seen)
            metrics |= _judgement(seen, drift)
            opened = self._gate.opens(drift)
        metrics |= {
            "drafter/age": float(age), "drafter/updated": float(opened), "drafter/uniform": float(self._alike),
            "drafter/replay_mb": self._replay.megabytes, "drafter/forgotten": float(lost),
        }  # fmt: skip
        if opened:
            self._begin(self._replay.draw(step), examples, step)
        elif due:
            self._replay.pass_over()
        if self._beside is None:
            metrics |= self._adopt()
        return metrics | {"time/drafter_s": watch.wall_s + time.perf_counter() - began}

    @property
    def _judges_first(self) -> bool:
        """Whether new rollouts are judged by a pass of their own; else the update's first mini-batch tells as much for nothing."""
        return self._config.gate > 0 or self._config.replay > 0

    def _begin(self, drawn: Sequence[Example], new: Sequence[Example], step: int) -> None:
        if self._beside is not None:
            self._running = self._beside.start(lambda: self._learn(drawn, new, step)), step - 1
            return
        done: Future[Learned] = Future()
        done.set_result(self._learn(drawn, new, step))
        self._running = done, step - 1

    def _learn(self, drawn: Sequence[Example], new: Sequence[Example], step: int) -> Learned:
        """One update, which depends on its arguments and the learner's state alone, wherever it runs."""
        began, config = time.perf_counter(), self._config
        judges = config.judge_every > 0 and step % config.judge_every == 0
        before = self._judge(new).overlap_K[0] if judges else 0.0
        lr = rate(step - 1, self._steps, config.lr, config.warmup_steps, config.decay, config.min_lr_ratio)
        share = max(1, -(-len(drawn) // config.minibatches))
        order = np.random.default_rng(step).permutation(len(drawn))
        parts = [order[start : start + share] for start in range(0, len(order), share)]
        stats = [self._learner.step([drawn[i] for i in part], lr) for part in parts]
        gained = {"drafter/gained": float(self._judge(new).overlap_K[0] - before)} if judges else {}
        return gained | {
            "drafter/loss": float(np.mean([s.loss for s in stats])), "drafter/grad_norm": float(np.mean([s.grad_norm for s in stats])),
            "drafter/lr": lr, "drafter/tokens": float(sum(s.tokens for s in stats)),
            "time/drafter_update_s": time.perf_counter() - began,
        }, stats[0].seen, together(s.agreement for s in stats)  # fmt: skip

    def _adopt(self) -> dict[str, float]:
        """Waits for the update under way, if there is one, and lets its head draft: between two rollouts."""
        if self._running is None:
            return {}
        (future, learned_from), self._running = self._running, None
        metrics, seen, self.agreement = future.result()
        self._door.admit(self.head, self._drafter.version + 1, learned_from)
        return metrics if self._judges_first else metrics | _judgement(seen, self._gate.drift(seen))

    def _judge(self, examples: Sequence[Example]) -> Judgement:
        return judge(self.head, examples, self._config.depths, self._settings.temperature, self._settings.tokens)

    def save(self, run: RunDir) -> None:
        """Puts the head as it stands into the run folder, in the format that vLLM and the speculators library load."""
        self._adopt()
        scratch, target = run.path / f".{FOLDER}.tmp", run.path / FOLDER
        shutil.rmtree(scratch, ignore_errors=True)
        save_head(self.head, scratch)
        if self.agreement:
            write_agreement(scratch, self.agreement)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)

    def state_dict(self) -> dict[str, Any]:
        """Head, optimizer, replay buffer and gate, for the checkpoint; an update that runs beside is waited for and adopted."""
        self._adopt()
        return {
            "learner": self._learner.state_dict(), "replay": self._replay.state_dict(), "gate": self._gate.state_dict(),
            "version": self._drafter.version, "learned_from": self._drafter.learned_from,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state; the learner then goes on bit for bit (with `async_steps` 0, to the drafts). Raises CheckpointError."""
        self._learner.load_state_dict(state["learner"])
        self._replay.load_state_dict(state.get("replay", {}), self.head.lm_head.weight.device)
        self._gate.load_state_dict(state.get("gate", {}))
        if state["version"] > self._drafter.version:
            self._door.admit(self.head, int(state["version"]), int(state["learned_from"]), trusted=True)


def online_learner(
    config: Config, policy: Policy, engine: Engine, door: Sentinel, state: Mapping[str, Any] | None = None
) -> OnlineLearner | None:
    """The learner of the engine's `eagle` drafter, going on from a checkpoint's `state`; None where none is wanted.

    Raises ModelError for a head that does not fit the policy, CheckpointError for a state that does not fit the head.
    """
    drafter, path = engine.drafters.get("eagle"), config.speculation.drafter_path
    if not config.drafter.learn or path is None or not isinstance(drafter, EagleDrafter):
        return None
    head = load_head(path)
    check_fits(head, policy.model)
    learner = OnlineLearner(
        config.drafter, config.rollout, head.to(policy.model.device), drafter, door, config.run.steps
    )
    if state is not None:
        learner.load_state_dict(state)
    return learner


def _judgement(seen: Judgement, drift: float) -> dict[str, float]:
    return {
        "drafter/overlap": float(seen.overlap_K[0]), "drafter/expected_length": seen.expected_length, "drafter/drift": drift,
    }  # fmt: skip


def share_of(metrics: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The learner's share of a step of `step_s` seconds, as a metric; none where nothing was learned."""
    return {"drafter/share": metrics["time/drafter_s"] / step_s} if "time/drafter_s" in metrics else {}
