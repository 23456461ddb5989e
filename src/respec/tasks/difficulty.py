"""Measured difficulty: a row's running mean reward decides whether it is asked again soon. Rows of which all samples fail, or all succeed, teach a
group-relative learner nothing (DAPO, arXiv 2503.14476, leaves such groups out after they were drawn; this does not draw them)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from respec.config import DifficultyConfig
from respec.errors import CheckpointError
from respec.types import ScoredRollout


class Difficulty:
    """Chooses rows: one that has never been asked, or whose running mean reward lies in the band, is taken when its turn comes; any other is passed
    over `patience` times first.

    `passed_over` rows were so for the step that was learned from last. Its state (the means, how often a row was passed over since it was last asked, where each task of the mixture is) goes into the checkpoint.
    """

    def __init__(self, config: DifficultyConfig, rows: Sequence[Sequence[int]]) -> None:
        self._config = config
        self._place = {row: i for i, row in enumerate(row for part in rows for row in part)}
        count = len(self._place)
        self._mean, self._seen = np.zeros(count), np.zeros(count, bool)
        self._passed = np.zeros(count, np.int64)
        self._cursor = np.zeros(len(rows), np.int64)
        self._passing = 0
        self.passed_over = 0

    def next(self, part: int, row_at: Callable[[int], int]) -> int:
        """The index in a task's own order that its next prompt has; `row_at` says which row an index is."""
        while True:
            index = int(self._cursor[part])
            self._cursor[part] += 1
            at = self._place[row_at(index)]
            if self._wanted(at):
                self._passed[at] = 0
                return index
            self._passed[at] += 1
            self._passing += 1

    def learn(self, scored: Iterable[ScoredRollout]) -> None:
        """Takes in the rewards of a step's groups, in canonical order."""
        for (row, _), group in groupby(scored, key=lambda item: item.rollout.key[:2]):
            at, mean = self._place[row], float(np.mean([item.reward for item in group]))
            rate = self._config.rate if self._seen[at] else 1.0
            self._mean[at] += rate * (mean - self._mean[at])
            self._seen[at] = True
        self.passed_over, self._passing = self._passing, 0

    def in_band(self) -> float:
        """The share of the rows asked so far that lie in the band; 0 before any was."""
        inside = (self._config.low <= self._mean) & (self._mean <= self._config.high)
        return float(inside[self._seen].mean()) if self._seen.any() else 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        parts = {"mean": self._mean, "seen": self._seen, "passed": self._passed, "cursor": self._cursor}
        return {name: torch.from_numpy(value.copy()) for name, value in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state. Raises CheckpointError if it is of other rows."""
        own = self.state_dict()
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise CheckpointError(
                "the difficulty of rows in the checkpoint is of other data than the configuration's; has a file of the task changed? Put it "
                "back, or begin anew with --fresh"
            )
        values = {name: value.numpy().copy() for name, value in state.items()}
        self._mean, self._seen, self._passed, self._cursor = (
            values[name] for name in ("mean", "seen", "passed", "cursor")
        )

    def _wanted(self, at: int) -> bool:
        inside = self._config.low <= self._mean[at] <= self._config.high
        return not self._seen[at] or inside or self._passed[at] >= self._config.patience
