"""The rewards of a mixture: each task's rollouts by its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from respec.config import TaskConfig
from respec.tasks.episodes import EpisodeReward
from respec.tasks.reward import RewardWorker
from respec.tasks.task import Task
from respec.types import Rollout, ScoredRollout


class MixedReward:
    """Scores rollouts by the rewards of the task that each is of, in a process a task. A context manager, to the loop like a `RewardWorker`."""

    def __init__(self, task: Task, config: TaskConfig) -> None:
        sections = zip(config.names, config.mixture, strict=True)
        self._workers = {name: RewardWorker(task.parts[name], section.reward) for name, section in sections}
        self.names = tuple(f"{task}/{name}" for task, worker in self._workers.items() for name in worker.names)
        self._stack = ExitStack()

    def __enter__(self) -> MixedReward:
        with ExitStack() as stack:
            for worker in self._workers.values():
                stack.enter_context(worker)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def score(self, rollouts: Sequence[Rollout]) -> tuple[ScoredRollout, ...]:
        """Rewards of rollouts, in their order; the parts of each are named `task/reward`. Raises RewardError as `RewardWorker.score` does."""
        found: dict[int, ScoredRollout] = {}
        for name, worker in self._workers.items():
            members = [i for i, rollout in enumerate(rollouts) if rollout.prompt.task == name]
            for i, scored in zip(members, worker.score([rollouts[i] for i in members]), strict=True):
                part = {f"{name}/{reward}": value for reward, value in scored.part.items()}
                found[i] = replace(scored, part=part, fell_back=tuple(f"{name}/{item}" for item in scored.fell_back))
        return tuple(found[i] for i in range(len(rollouts)))


Reward = RewardWorker | MixedReward | EpisodeReward


def reward_of(task: Task, config: TaskConfig) -> Reward:
    """What scores a task's rollouts, to be entered."""
    if task.episodes is not None:
        return EpisodeReward()
    return MixedReward(task, config) if task.parts else RewardWorker(task, config.reward)
