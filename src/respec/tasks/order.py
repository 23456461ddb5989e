"""Which prompt comes when: place 0, 1, 2, ... of a run's training stream, a pure function of the seed unless rows are chosen by difficulty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from respec.config import Config
from respec.tasks.difficulty import Difficulty
from respec.tasks.task import Task
from respec.types import Prompt

Weights = Callable[[int], Sequence[float]]
"""The weights of a mixture's tasks at a place."""


class Order:
    """Calling it with a place gives its prompt and the prompt's draw: how often the row has come before.

    Each task's rows are walked through in permutations of them, one an epoch, drawn from the seed; the epoch is the draw. A mixture deals places
    out by `Interleave`. With a `difficulty` rows are passed over, so the places must be asked for in order, each once.
    """

    def __init__(
        self, trains: Sequence[Sequence[Prompt]], seed: int, weights: Weights, difficulty: Difficulty | None
    ) -> None:
        self.difficulty = difficulty
        self._trains, self._seed = trains, seed
        self._interleave = Interleave(len(trains), weights, seed)
        self._permutation = lru_cache(maxsize=4 * len(trains))(self._permuted)

    def __call__(self, place: int) -> tuple[Prompt, int]:
        part, index = self._interleave(place)
        if self.difficulty is not None:
            index = self.difficulty.next(part, lambda at: self._row(part, at)[0].row)
        return self._row(part, index)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing of an order that is a pure function."""
        return {} if self.difficulty is None else {"difficulty": self.difficulty.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state. Raises CheckpointError if it is of other rows."""
        if self.difficulty is not None:
            self.difficulty.load_state_dict(state.get("difficulty", {}))

    def _row(self, part: int, index: int) -> tuple[Prompt, int]:
        train = self._trains[part]
        epoch, at = divmod(index, len(train))
        return train[self._permutation(epoch, len(train))[at]], epoch

    def _permuted(self, epoch: int, size: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation(size)


class Interleave:
    """Deals places out to the tasks of a mixture in proportion to their weights: a pure function of (seed, place).

    Each place every task earns its share of it, and the one with the most to its credit is dealt the place (smooth weighted round-robin). So at any
    time a task has had its share, but for less than the number of tasks. The seed says who comes first among equals.
    """

    def __init__(self, tasks: int, weights: Weights, seed: int) -> None:
        self._weights = weights
        # far below what a place is worth, so that they only decide between equals
        self._credit = 1e-6 * np.random.Generator(np.random.Philox(key=[seed, 0])).random(tasks)
        self._counts = [0] * tasks
        self._dealt: list[tuple[int, int]] = []

    def __call__(self, place: int) -> tuple[int, int]:
        """The task of a place, and how many places before it were that task's."""
        if len(self._counts) == 1:
            return 0, place
        while len(self._dealt) <= place:
            weight = np.array(self._weights(len(self._dealt)), float)
            self._credit += weight / weight.sum()
            # credit left from a stage before is not called in by a task that has no weight now
            task = int(np.where(weight > 0, self._credit, -np.inf).argmax())
            self._credit[task] -= 1.0
            self._dealt.append((task, self._counts[task]))
            self._counts[task] += 1
        return self._dealt[place]


def order_of(task: Task, config: Config) -> Order:
    """The order of a run. Stages of a mixture begin at the place that their step has where every step takes rollout.prompts_per_step."""
    asked, per_step = config.task, config.rollout.prompts_per_step
    trains = [part.train for part in task.parts.values()] or [task.train]
    shares = [part.weight for part in asked.mixture] or [1.0]
    stages = [
        ((stage.from_step - 1) * per_step, [stage.weights.get(name, 0.0) for name in asked.names])
        for stage in asked.stage
    ]

    def weights(place: int) -> Sequence[float]:
        return next((its for first, its in reversed(stages) if place >= first), shares)

    difficulty = (
        Difficulty(asked.difficulty, [[prompt.row for prompt in train] for train in trains])
        if asked.difficulty
        else None
    )
    return Order(trains, config.run.seed, weights, difficulty)
