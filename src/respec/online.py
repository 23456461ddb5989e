"""The online learner: the EAGLE-3 head learns from the rollouts that each step has just drawn, and so follows the policy (ReSpec, section 4.2).

What it learns from is seen in the policy learner's own forward pass and has no gradient: the policy's stay bit for bit what they would be
without it. The laws it learns are of the policy that drew the rollouts, one update older than the one it will draft for next.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from respec.config import Config
from respec.drafter.agreement import MODES, Agreement, read_agreement, write_agreement
from respec.drafter.beside import Beside
from respec.drafter.examples import Example
from respec.drafter.judge import Judgement, Learned, judge
from respec.drafter.learner import DrafterLearner, LearnerSettings
from respec.drafter.replay import Replay
from respec.drafter.schedule import Gate, rate
from respec.drafter.watcher import Seen, Watcher
from respec.drafter.weighting import weigh
from respec.errors import NonFiniteError
from respec.models.eagle import EagleHead, check_fits, load_head, save_head
from respec.models.heap import Growth
from respec.models.load import Policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.rollout.vllm.engine import VllmEngine
from respec.sentinel import Sentinel
from respec.types import Mode, Sample

FOLDER = "drafter"
Values = Float64[np.ndarray, "R"]


class Purpose(IntEnum):
    """What a choice is drawn for: each has draws of its own."""

    ROLLOUTS = 0
    REPLAY = 1
    MINIBATCHES = 2


class OnlineLearner:
    """Teaches the head of an engine's `eagle` drafter, in step with the policy. The head in the making is float32; what drafts is a
    snapshot of it, which enters by the sentinel's door, between two rollouts.

    A step is `watch`, for the policy's update to be looked at, and `update`. With `async_steps` 1 an update begun in one step runs beside
    the next one's generation and is adopted in that one's `update`: drafts are then by a head one update older.
    `say` gets one line for each update that failed.
    """

    def __init__(
        self, run: Config, head: EagleHead, drafter: EagleDrafter, door: Sentinel, say: Callable[[str], None]
    ) -> None:
        config, rollout = run.drafter, run.rollout
        self._config, self._sampling, self._steps, self._seed = config, rollout.sampling(), run.run.steps, run.run.seed
        self._drafter, self._door, self._say = drafter, door, say
        self._settings = LearnerSettings(
            loss=config.loss,
            lr=config.lr,
            depths=config.depths,
            grad_clip=config.grad_clip,
            temperature=rollout.temperature or 1.0,
            modes=tuple(mode for mode in MODES if mode == run.speculation.mode),
        )
        self._learner, self._growth = DrafterLearner(head, self._settings), Growth()
        self._replay = Replay(config.replay_mb, config.replay)
        self._gate = Gate(config.gate)
        self._beside = Beside(config.threads, head.lm_head.weight.device) if config.async_steps else None
        self._running: tuple[Future[Learned], int] | None = None
        self._alike = False
        # how far the drafts of one head would have stood on rollouts that it had not seen, by mode; empty on a step that showed nothing of it.
        # Of an update that ran beside it is told when that is adopted
        self.agreement: Mapping[Mode, Agreement] = {}
        self._agreed: Mapping[Mode, Agreement] = {}

    @property
    def head(self) -> EagleHead:
        """The head in the making."""
        return self._learner.head

    def watch(self, samples: Sequence[Sample], step: int) -> Watcher:
        """What is to look on at the policy's update on these samples: at a choice of them that depends on seed and step alone."""
        chosen = [samples[i] for i in self.choice(len(samples), step)]
        rewards = np.array([sample.scored.reward for sample in chosen])
        spread = np.array([float(sample.advantage_T[0]) if len(sample.advantage_T) else 0.0 for sample in chosen])
        weights = self.weights(rewards, spread)
        keys = [sample.scored.rollout.key for sample in chosen]
        stored = getattr(torch, self._config.features)
        return Watcher(
            self.head.shape.taps, self._sampling, dict(zip(keys, weights.tolist(), strict=True)), step - 1, stored
        )

    def choice(self, rollouts: int, step: int) -> list[int]:
        """Which of so many rollouts are learned from: it depends on seed and step alone."""
        wanted = math.ceil(rollouts * self._config.share / self._config.every)
        return sorted(self._draws(step, Purpose.ROLLOUTS).permutation(rollouts)[:wanted].tolist())

    def weights(self, reward_R: Values, advantage_R: Values) -> Values:
        """How much each of those counts."""
        weights, self._alike = weigh(self._config.weighting, reward_R, self._config.reward_min, advantage_R)
        return weights

    def update(self, watch: Seen, step: int) -> dict[str, float]:
        """Adopts the update that ran beside, if one did, and begins the next where one is due; what was done and seen, as metrics.

        An update whose loss or gradient is not finite leaves head and optimizer as they were: `say` tells, and the run goes on.
        """
        began = time.perf_counter()
        age = step - 1 - self._drafter.learned_from
        self.agreement = {}
        metrics, seen = {"drafter/failed": 0.0} | self._adopt(), watch.examples
        examples = [example for example in seen if example.finite]
        if left_out := len(seen) - len(examples):
            self._say(
                f"drafter: {left_out} of {len(seen)} rollouts are not learned from, for hidden states or laws that are not finite"
            )
        lost = self._replay.add(examples)
        due = step % self._config.every == 0
        opened, known = due and bool(examples), None
        if opened and self._judges_first(step):
            known = self._judge(examples)
            metrics |= self._take(known)
            opened = known.finite and self._gate.opens(metrics["drafter/drift"])
            if not known.finite:
                metrics |= self._failed("drafter update: hidden states of this step's rollouts are not finite")
        metrics |= {
            "drafter/age": float(age), "drafter/updated": float(opened), "drafter/uniform": float(self._alike),
            "drafter/replay_mb": self._replay.megabytes, "drafter/forgotten": float(lost),
            "drafter/left_out": float(left_out),
        }  # fmt: skip
        if opened:
            self._begin(self._replay.draw((self._seed, step, Purpose.REPLAY)), examples, step, known)
        elif due:
            self._replay.pass_over()
        if self._beside is None:
            metrics |= self._adopt()
        self._growth.give_back()
        return metrics | {"time/drafter_s": watch.wall_s + time.perf_counter() - began}

    def share(self) -> None:
        """Between two rounds: an update that runs beside has its processor threads, and generation has them back once it is done."""
        if self._beside is not None:
            self._beside.share()

    def _judges_first(self, step: int) -> bool:
        """Whether this step's rollouts are judged by a pass of their own; else they are the update's one mini-batch, whose pass tells as much."""
        config = self._config
        alone = config.gate == config.replay == 0 and config.every == 1
        return not alone or (config.minibatches > 1 and self._measures(step))

    def _measures(self, step: int) -> bool:
        return self._config.judge_every > 0 and step % self._config.judge_every == 0

    def _begin(self, drawn: Sequence[Example], new: Sequence[Example], step: int, known: Judgement | None) -> None:
        if self._beside is not None:
            self._running = self._beside.start(lambda: self._learn(drawn, new, step, known)), step - 1
            return
        done: Future[Learned] = Future()
        done.set_result(self._learn(drawn, new, step, known))
        self._running = done, step - 1

    def _learn(self, drawn: Sequence[Example], new: Sequence[Example], step: int, known: Judgement | None) -> Learned:
        """One update, which depends on its arguments and the learner's state alone, wherever it runs. `known` is the judgement of `new`."""
        began, config = time.perf_counter(), self._config
        lr = rate(step - 1, self._steps, config.lr, config.warmup_steps, config.decay, config.min_lr_ratio)
        share = max(1, -(-len(drawn) // config.minibatches))
        order = self._draws(step, Purpose.MINIBATCHES).permutation(len(drawn))
        parts = [order[start : start + share] for start in range(0, len(order), share)]
        try:
            stats = self._learner.update([[drawn[i] for i in part] for part in parts], lr, judges=known is None)
        except NonFiniteError as error:
            return Learned({"time/drafter_update_s": time.perf_counter() - began}, None, str(error))
        before, gained = known or stats[0].seen, dict[str, float]()
        if self._measures(step) and before is not None:
            gained["drafter/gained"] = float(self._judge(new).overlap_K[0] - before.overlap_K[0])
        return Learned(gained | {
            "drafter/loss": float(np.mean([s.loss for s in stats])), "drafter/grad_norm": float(np.mean([s.grad_norm for s in stats])),
            "drafter/lr": lr, "drafter/tokens": float(sum(s.tokens for s in stats)),
            "time/drafter_update_s": time.perf_counter() - began,
        }, stats[0].seen)  # fmt: skip

    def _adopt(self) -> dict[str, float]:
        """Waits for the update under way, if there is one, and lets its head draft: between two rollouts."""
        if self._running is None:
            return {}
        (future, learned_from), self._running = self._running, None
        done = future.result()
        self.share()
        if done.failure:
            return dict(done.metrics) | self._failed(done.failure)
        self._door.admit(self.head, self._drafter.version + 1, learned_from)
        return dict(done.metrics) | (self._take(done.seen) if done.seen is not None else {})

    def _take(self, seen: Judgement) -> dict[str, float]:
        """Keeps what was seen of the head's drafts, and says it as metrics; nothing where it is not finite."""
        if not seen.finite:
            return {}
        self.agreement = self._agreed = seen.agreement
        return {
            "drafter/overlap": float(seen.overlap_K[0]), "drafter/expected_length": seen.expected_length,
            "drafter/drift": self._gate.drift(seen),
        }  # fmt: skip

    def _failed(self, why: str) -> dict[str, float]:
        self._say(f"{why}; version {self._drafter.version} goes on drafting")
        return {"drafter/failed": 1.0}

    def _draws(self, step: int, purpose: Purpose) -> np.random.Generator:
        return np.random.default_rng((self._seed, step, purpose))

    def _judge(self, examples: Sequence[Example]) -> Judgement:
        asked = self._settings
        return judge(self.head, examples, asked.depths, asked.temperature, asked.tokens, asked.modes)

    def _settled(self) -> tuple[int, int]:
        """Waits for the update under way, which is still to be adopted at its time; version and origin of the head in the making."""
        if self._running is not None:
            future, learned_from = self._running
            failure = future.result().failure
            self.share()
            if not failure:
                return self._drafter.version + 1, learned_from
        return self._drafter.version, self._drafter.learned_from

    def save(self, folder: Path) -> None:
        """Puts the head as it stands into the folder, as `drafter/`, in the format that vLLM and the speculators library load."""
        self._settled()
        scratch, target = folder / f".{FOLDER}.tmp", folder / FOLDER
        shutil.rmtree(scratch, ignore_errors=True)
        save_head(self.head, scratch)
        if agreed := self._agreed or read_agreement(target):
            write_agreement(scratch, agreed)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)

    def state_dict(self) -> dict[str, Any]:
        """Head, optimizer, replay buffer and gate, for the checkpoint; an update that runs beside is waited for.

        Nothing else changes: its head drafts from its own time on, whether a checkpoint is written or not. A run that goes on from the checkpoint
        begins with it.
        """
        version, learned_from = self._settled()
        return {
            "learner": self._learner.state_dict(), "replay": self._replay.state_dict(), "gate": self._gate.state_dict(),
            "version": version, "learned_from": learned_from,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state; the learner then goes on bit for bit (with `async_steps` 0, to the drafts). Raises CheckpointError."""
        self._learner.load_state_dict(state["learner"])
        self._replay.load_state_dict(state.get("replay", {}), self.head.lm_head.weight.device)
        self._gate.load_state_dict(state.get("gate", {}))
        if state["version"] > self._drafter.version:
            self._door.admit(self.head, int(state["version"]), int(state["learned_from"]), trusted=True)


def online_learner(
    config: Config,
    policy: Policy,
    engine: Engine | VllmEngine,
    door: Sentinel,
    say: Callable[[str], None],
    state: Mapping[str, Any] | None = None,
) -> OnlineLearner | None:
    """The learner of the engine's `eagle` drafter, going on from a checkpoint's `state`; None where none is wanted.

    Raises ModelError for a head that does not fit the policy, CheckpointError for a state that does not fit the head.
    """
    drafter, path = engine.drafters.get("eagle"), config.speculation.drafter_path
    if not config.drafter.learn or path is None or not isinstance(drafter, EagleDrafter):
        return None
    head = load_head(path)
    check_fits(head, policy.model)
    learner = OnlineLearner(config, head.to(policy.model.device), drafter, door, say)
    if isinstance(engine, Engine):
        engine.between_rounds.append(learner.share)
    if state is not None:
        learner.load_state_dict(state)
    return learner
