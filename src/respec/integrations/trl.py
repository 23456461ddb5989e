"""Our rollouts for TRL: `GRPOTrainer(..., rollout_func=RespecRollouts())`.

prompts ─▶ TRL's own template and tokens ─▶ engine ─▶ ids and log-probabilities ─▶ TRL: rewards, loss, optimizer
                                              ▲ weights, whenever the trainer's have changed; histories; the head that learns
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from respec.adaptive import make_planner
from respec.config import DrafterConfig, SpeculationConfig, parse_section
from respec.drafting import first_head, make_drafters
from respec.errors import ConfigError
from respec.integrations.trl_lessons import Lessons, lessons
from respec.integrations.trl_terms import (
    Trainer,
    dtype_of,
    policy_of,
    refuse_trainer,
    row_of,
    sampling_of,
    written,
)
from respec.models.load import Policy
from respec.naming import drawing, elsewhere, planned
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.speculation import memory
from respec.stages import estimate_idle, learn_histories
from respec.types import Ask, Prompt, Rollout, Stream
from respec.weights.checkpoint import read_state, write_state
from respec.weights.publish import publish
from respec.weights.swap import swap

FOLDER = "respec"
# A head has random weights until it is read. TRL shuffles by torch's own generator: a number of it that we took would change the policy's training.
UNDISTURBED = torch.random.fork_rng(devices=[])


@dataclass(frozen=True)
class Serving:
    """What draws for one trainer, built at its first generation. `dtype` is that of the decoding snapshots."""

    policy: Policy
    engine: Engine
    planner: Sentinel
    dtype: str
    lessons: Lessons | None


class RespecRollouts:
    """A `rollout_func` for TRL's GRPOTrainer: exact speculative rollouts by our engine, which an adaptive server plans. One object serves one trainer.

    `speculation` has the keys of the section [speculation] of our configuration, `drafter` those of [drafter]: with `{"learn": True}` the head of
    drafter `eagle` follows the policy. `dtype` is the engine's: `trainer` takes the one that the trainer multiplies in, so that rollouts are as
    much on policy as TRL's own; or `auto`, `bfloat16`, `float32`, `float64`, `int8`. `seed` keys every random number, None: the trainer's.
    `max_batch` completions are drawn at once, None: a generation's, up to 64. `greedy_eval` has evaluations take the most probable tokens; else they are sampled as in
    training, as TRL does. `say` gets lines for the user.

    Raises ConfigError for settings that do not go together, here or, of those of the trainer, when it first asks for rollouts, ModelError for a model
    that the engine does not handle.
    """

    def __init__(
        self,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        drafter: DrafterConfig | Mapping[str, Any] | None = None,
        *,
        dtype: str = "trainer",
        seed: int | None = None,
        max_batch: int | None = None,
        greedy_eval: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self._speculation = parse_section(SpeculationConfig, speculation or {}, "speculation")
        self._drafter = parse_section(DrafterConfig, drafter or {}, "drafter")
        if self._speculation.mode != "matching":
            raise ConfigError(
                f"speculation.mode '{self._speculation.mode}' is not for TRL, which knows no weights of tokens and resumes no drafts; take 'matching'"
            )
        if self._drafter.learn and "eagle" not in self._speculation.wanted:
            raise ConfigError(
                "drafter.learn is on, but drafter 'eagle' is not among those of speculation; name it there, with drafter_path"
            )
        self._dtype, self._seed, self._max_batch, self._greedy_eval, self._say = (
            dtype,
            seed,
            max_batch,
            greedy_eval,
            say,
        )
        self._serving: Serving | None = None
        self._trainer: Trainer = None
        self._published: tuple[int, int] = (-1, 0)
        # the step of the last generation for training, and how many there had been in it
        self._drawn: tuple[int, int] = (-1, 0)
        # of the last generation, in canonical order
        self.rollouts: tuple[Rollout, ...] = ()

    @UNDISTURBED
    def __call__(self, prompts: Sequence[Any], trainer: Trainer) -> dict[str, Any]:
        """A completion of each prompt, as TRL wants it: token ids, and the log-probabilities that they were sampled with."""
        refuse_trainer(trainer)
        if self._serving is None:
            self._begin(trainer)
        elif trainer is not self._trainer:
            raise ConfigError(
                "these rollouts are another trainer's; make a RespecRollouts of its own for each GRPOTrainer"
            )
        training = trainer.model.training
        weights_s = self._renew(trainer)
        prompt_ids = [list(map(int, ids)) for ids in trainer._tokenize_prompts(prompts)[0]]
        asks, place_of = _asks(
            prompt_ids, Stream.TRAIN if training else Stream.EVAL, self._draw(trainer) if training else 0
        )
        serving, sampling = self._serving, sampling_of(trainer, greedy=self._greedy_eval and not training)
        assert serving is not None
        self.rollouts, stats = serving.engine.rollout(asks, sampling, serving.planner.under(sampling))
        place = [place_of[rollout.prompt.token_ids][rollout.sample] for rollout in self.rollouts]
        if training:
            self._learn(serving, place, trainer, stats)
        serving.planner.take_decisions()
        metrics = drawing(stats) | planned(stats, self._speculation.wanted) | {"time/weights_s": weights_s}
        _log(trainer, metrics)
        drawn = dict(zip(place, self.rollouts, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [drawn[i].token_T.tolist() for i in range(len(prompts))],
            "logprobs": [(drawn[i].logprob_T - drawn[i].kept_logmass_T).tolist() for i in range(len(prompts))],
        }

    @property
    def version(self) -> int:
        """Of the weights that decode: the trainer's step, unless weights have also changed without one. Raises ConfigError before the first rollout."""
        if self._serving is None:
            raise ConfigError("nothing has been drawn yet")
        return self._serving.engine.version

    def save(self, folder: str | Path) -> None:
        """Puts the head that learns into the folder, as `drafter/`, in the format that vLLM and the speculators library load; nothing without one."""
        if self._serving is not None and self._serving.lessons is not None:
            self._serving.lessons.online.save(Path(folder))

    def _begin(self, trainer: Trainer) -> None:
        """Builds engine, planner and learner around the trainer's model, and takes up what a checkpoint has of them."""
        policy = policy_of(trainer)
        dtype = dtype_of(trainer, policy.model) if self._dtype == "trainer" else self._dtype
        seed = trainer.args.seed if self._seed is None else self._seed
        asked, step = self._speculation, trainer.state.global_step
        sampling = sampling_of(trainer, greedy=False)
        decoder, drafters = publish(policy, dtype, step), make_drafters(asked, policy, dtype, step)
        batch = self._max_batch or min(64, trainer.args.generation_batch_size)
        engine = Engine(decoder, policy.tokenizer, policy.eos_token_ids, seed, batch, drafters=drafters)
        planner = make_planner(
            asked, decoder, policy.tokenizer, drafters, batch, 128 + sampling.max_new_tokens // 4, self._say
        )
        first = partial(first_head, asked, policy) if asked.drafter_path else None
        door = Sentinel(planner, engine.drafters, self._say, first)
        learning = lessons(trainer, policy, engine, door, asked, self._drafter, sampling, seed, self._say)
        self._trainer, self._serving = trainer, Serving(policy, engine, door, dtype, learning)
        self._published = (step, written(policy.model))
        trainer.add_callback(Beside(self))
        if step:
            self._take_up(Path(trainer.args.output_dir) / f"checkpoint-{step}" / FOLDER)

    def _renew(self, trainer: Trainer) -> float:
        """Publishes the trainer's weights to the engine if they have changed; seconds taken."""
        serving, began = self._serving, time.perf_counter()
        assert serving is not None
        now = (trainer.state.global_step, written(serving.policy.model))
        if now != self._published:
            swap(serving.engine, serving.policy, serving.dtype, max(now[0], serving.engine.version + 1))
            self._published = now
        return time.perf_counter() - began

    def _draw(self, trainer: Trainer) -> int:
        """Which generation of the run this is, for the random numbers: from the step, which a resumed run has, and not from a count of calls."""
        step = trainer.state.global_step
        self._drawn = (step, self._drawn[1] + 1 if self._drawn[0] == step else 0)
        return step * trainer.args.gradient_accumulation_steps + self._drawn[1]

    def _learn(self, serving: Serving, place: Sequence[int], trainer: Trainer, stats: Any) -> None:
        """What a generation for training teaches: the controller, the look-up drafters, and, later, the head."""
        agreed = {}
        if serving.lessons is not None:
            agreed = serving.lessons.online.agreement
            serving.lessons.settle(trainer)
            serving.lessons.see(self.rollouts, place, trainer.state.global_step + 1)
        estimate_idle(serving.planner, serving.engine, self._speculation, self.rollouts, stats, agreed)
        learn_histories(serving.engine, self.rollouts)

    @UNDISTURBED
    def _step_ended(self) -> None:
        if self._serving is not None and self._serving.lessons is not None:
            metrics = self._serving.lessons.learn(self._trainer, self._trainer.state.global_step)
            if metrics:
                _log(self._trainer, metrics | {"drafter/alarms": float(len(self._serving.planner.take_alarms()))})

    def _keep(self, folder: Path) -> None:
        """Writes what a run that goes on takes up: the head, its learner, what the controller knows."""
        serving = self._serving
        assert serving is not None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if serving.planner.controller is not None:
            memory.keep(serving.planner.controller, folder)
        if serving.lessons is not None:
            self.save(folder)
            write_state(folder, serving.lessons.online.state_dict())

    def _take_up(self, folder: Path) -> None:
        """Raises CheckpointError where the learner in the folder is of another head."""
        serving = self._serving
        assert serving is not None
        if serving.planner.controller is not None:
            memory.recall(serving.planner.controller, folder)
        if serving.lessons is None:
            return
        try:
            serving.lessons.online.load_state_dict(read_state(folder))
        except OSError:
            self._say(
                f"there is no drafter in '{folder}' to go on with: it begins as it is in speculation.drafter_path. Nothing but speed depends on it"
            )


class Beside(TrainerCallback):
    """Keeps step with the trainer; the rollouts add it to their trainer themselves."""

    def __init__(self, rollouts: RespecRollouts) -> None:
        self._rollouts = rollouts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollouts._step_ended()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollouts._keep(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rollouts.save(args.output_dir)


def _asks(
    prompt_ids: Sequence[Sequence[int]], stream: Stream, draw: int
) -> tuple[list[Ask], dict[tuple[int, ...], list[int]]]:
    """An ask for each different prompt, of as many samples as it is there; and the places that a prompt's samples are wanted at."""
    place_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, ids in enumerate(prompt_ids):
        place_of[tuple(ids)].append(at)
    return [Ask(Prompt(row_of(ids), "", ids), stream, draw, len(at)) for ids, at in place_of.items()], place_of


def _log(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Into the means that the trainer logs next, beside its own."""
    for name, value in elsewhere(metrics).items():
        trainer._metrics["train" if trainer.model.training else "eval"][name].append(value)
