"""The head of drafter `eagle` learns behind a trainer that is not ours.

Our own loop looks on at the policy's update. TRL's cannot be looked into, so what a head learns from is seen in a forward pass of its own, over a
share of the rollouts, right after they were drawn: of the policy that drew them. Rewards are known to TRL only later; it keeps them in its log of
the last generation, where they are read when they are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from transformers import PreTrainedModel

from respec.config import Config, DrafterConfig, RolloutConfig, RunConfig, SpeculationConfig
from respec.drafter.examples import Example, capture
from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.online import OnlineLearner, online_learner
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.types import Rollout, Sampling


@dataclass(frozen=True)
class Looked:
    """What was seen since the last update, and how long that took."""

    examples: Sequence[Example] = ()
    wall_s: float = 0.0


class Lessons:
    """Collects what the head learns from, and has it learn once a step.

    A generation is `see`n; from the next one on, or at the step's end, its rewards are known (`settle`).
    """

    def __init__(self, online: OnlineLearner, model: PreTrainedModel, sampling: Sampling) -> None:
        self.online = online
        self._model, self._sampling = model, sampling
        self._looked = Looked()
        self._unweighted: list[Example] = []
        self._place: list[int] = []
        self._drawn = 0

    def see(self, rollouts: Sequence[Rollout], place: Sequence[int], step: int) -> None:
        """Looks at a choice of a generation's rollouts; `place` says where the trainer has each of them. `step` is the one they are drawn for."""
        began = time.perf_counter()
        chosen = self.online.choice(len(rollouts), step)
        with _packed(self._model):
            seen = capture(self._model, self.online.head.shape.taps, [rollouts[i] for i in chosen], self._sampling)
        self._unweighted = [replace(example, version=step - 1) for example in seen]
        self._place, self._drawn = [place[i] for i in chosen], len(rollouts)
        self._looked = replace(self._looked, wall_s=self._looked.wall_s + time.perf_counter() - began)

    def settle(self, trainer: Any) -> None:
        """Gives what was seen last the weights that its rewards make."""
        if self._unweighted:
            rewards, advantages = rewards_of(trainer, self._drawn)
            weights = self.online.weights(rewards[self._place], advantages[self._place])
            weighed = [replace(e, weight=float(w)) for e, w in zip(self._unweighted, weights, strict=True)]
            self._looked, self._unweighted = replace(self._looked, examples=[*self._looked.examples, *weighed]), []

    def learn(self, trainer: Any, step: int) -> dict[str, float]:
        """The head learns from what was seen since it last did, after optimizer step `step`; nothing where nothing was drawn."""
        self.settle(trainer)
        if not self._looked.examples:
            return {}
        looked, self._looked = self._looked, Looked()
        return self.online.update(looked, step)


def lessons(
    trainer: Any,
    policy: Policy,
    engine: Engine,
    door: Sentinel,
    speculation: SpeculationConfig,
    drafter: DrafterConfig,
    sampling: Sampling,
    seed: int,
    say: Callable[[str], None],
) -> Lessons | None:
    """The lessons of the engine's head; None where it is not to learn. Raises ModelError for a head that does not fit the policy."""
    rollout = RolloutConfig(
        max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )  # fmt: skip
    # the task and the policy's learner are TRL's: of a run's configuration there are only these sections
    run = Config.model_construct(
        run=RunConfig(seed=seed, steps=max(trainer.state.max_steps, 0)), rollout=rollout, speculation=speculation, drafter=drafter
    )  # fmt: skip
    online = online_learner(run, policy, engine, door, say)
    return Lessons(online, policy.model, sampling) if online is not None else None


def rewards_of(trainer: Any, completions: int) -> tuple[Float64[np.ndarray, "R"], Float64[np.ndarray, "R"]]:
    """Rewards and advantages of the last generation's completions, in the trainer's order; a completion that no reward function could score has 0.
    Where TRL does not keep them, all are alike."""
    logs = getattr(trainer, "_logs", {})
    advantages, by_name = list(logs.get("advantages", ())), logs.get("rewards", {})
    if len(advantages) < completions or any(len(values) != len(advantages) for values in by_name.values()):
        return np.zeros(completions), np.zeros(completions)
    parts = np.nan_to_num(np.array([list(by_name[name])[-completions:] for name in trainer.reward_func_names], float))
    return np.array(trainer.reward_weights.tolist()) @ parts, np.array(advantages[-completions:], float)


@contextmanager
def _packed(model: PreTrainedModel) -> Iterator[None]:
    """For as long, the model attends over packed sequences, and without dropout; then it is as the trainer had it."""
    attention, modes = (
        model.config._attn_implementation or "eager",
        [(module, module.training) for module in model.modules()],
    )
    use_packed_attention(model)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        for module, training in modes:
            module.training = training
