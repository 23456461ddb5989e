"""Where a step's samples come from: the walk through the data, dynamic sampling, and what a budget of tokens left over from steps before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from respec.config import Config
from respec.errors import ConfigError
from respec.naming import Generated, Supplied
from respec.policy.budget import samples_from, spend, state_of, tokens_of
from respec.policy.filters import FILTERS
from respec.policy.presets import resolve
from respec.rollout.collect import Collected, Group, collect
from respec.stages import asks_from
from respec.tasks.order import Order
from respec.tasks.overlong import penalized
from respec.types import Ask, Rollout, Sample, ScoredRollout


@dataclass(frozen=True)
class Drawn:
    """A step's rollouts: all of them, and those to learn from, both in canonical order; `place_of` a group's (row, draw) in prompt order."""

    made: Generated
    kept: tuple[ScoredRollout, ...]
    place_of: Mapping[tuple[int, int], int]


class Supply:
    """Draws the rollouts of each step and hands on its samples. Holds how far the walk through the data has come, and the samples that wait:
    state of the run, for one step may draw more prompts than another.

    `say` gets a line for each step that drew as often as it may and has too little. Raises ConfigError for an overlong penalty that
    would begin before an answer does.
    """

    def __init__(self, config: Config, order: Order, say: Callable[[str], None]) -> None:
        self.order = order
        self._config, self._say = config, say
        self._filter = config.collect.filter or resolve(config.policy).filter
        self._budget = config.policy.token_budget or 0
        self._longest = config.collect.overlong_max or config.rollout.max_new_tokens
        if config.collect.overlong_cache > self._longest:
            raise ConfigError(
                f"collect.overlong_cache is {config.collect.overlong_cache} tokens, more than the longest answer has ({self._longest}); set it "
                "to a part of that, for example a fifth"
            )
        self._cursor = 0
        self._waiting: tuple[Sample, ...] = ()
        self._counts = Supplied()

    def draw(self, generate: Callable[[Sequence[Ask]], Generated]) -> Drawn:
        """A step's rollouts: prompts_per_step groups, or as many as filter and budget call for.

        The filter sees rewards without the overlong penalty, which tells answers apart that are all right or all wrong.
        """
        config, size = self._config.collect, self._config.rollout.prompts_per_step
        found = collect(self._ask, generate, self._stays, self._missing, self._first(), size, config.max_draws)
        if not found.enough and config.max_draws > 1:
            self._say(
                f"{len(found.draws)} draws left {len(found.kept)} of {len(found.groups)} groups to learn from, too few for a step; it goes on "
                "with what it has (collect.max_draws)"
            )
        kept = self._chosen(found)
        made = sum(found.draws[1:], start=found.draws[0])
        if self.order.difficulty is not None:
            self.order.difficulty.learn(made.scored_R)
        self._counts = Supplied(
            draws=len(found.draws), groups=len(found.groups), dropped_groups=len(found.groups) - len(kept),
            dropped_tokens=_tokens(made.scored_R) - _tokens(chain(*kept)),
        )  # fmt: skip
        shaped = self._shaped(made.scored_R)
        chosen = {item.rollout.key for item in chain(*kept)}
        return Drawn(
            dataclasses.replace(made, scored_R=shaped),
            tuple(item for item in shaped if item.rollout.key in chosen),
            {group[0].rollout.key[:2]: place for place, group in enumerate(found.groups)},
        )

    def spend(self, samples: Sequence[Sample], drawn: Drawn, step: int) -> tuple[Sample, ...]:
        """What the step trains on: the samples, or under a budget as many tokens of those that waited and of these, in prompt order.

        The rest waits for the next step, with the log-probabilities and the version it was sampled under; what has waited
        collect.carry_steps steps is thrown away.
        """
        if not self._budget:
            return tuple(samples)
        fresh = sorted(
            (sample for sample in samples if self._trained(sample.scored.rollout)),
            key=lambda sample: (drawn.place_of[sample.scored.rollout.key[:2]], sample.scored.rollout.sample),
        )
        now, later = spend((*self._waiting, *fresh), self._budget)
        self._waiting = tuple(s for s in later if _age(s, step) <= self._config.collect.carry_steps)
        left = tokens_of(self._waiting)
        self._counts = dataclasses.replace(
            self._counts, carried_tokens=tokens_of(sample for sample in now if _age(sample, step) > 1), left_tokens=left,
            expired_tokens=tokens_of(later) - left,
        )  # fmt: skip
        return tuple(sorted(now or samples, key=lambda sample: sample.scored.rollout.key))

    @property
    def counts(self) -> Supplied | None:
        """What became of the last step's groups; None where nothing but drawing can become of them."""
        return self._counts if self._filter != "none" or self._budget else None

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: numbers and tensors."""
        return {"cursor": self._cursor, "waiting": state_of(self._waiting), "order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Takes up the state saved after `step`; of a checkpoint without one, that of a run that has drawn no more than it must."""
        self._cursor = int(state.get("cursor", step * self._config.rollout.prompts_per_step))
        self._waiting = samples_from(state.get("waiting", {}))
        self.order.load_state_dict(state.get("order", {}))

    def _ask(self, count: int) -> tuple[Ask, ...]:
        self._cursor += count
        return asks_from(self.order, self._config, self._cursor - count, count)

    def _first(self) -> int:
        """prompts_per_step, less the share of the budget that is there already: else what waits would grow, and all be old."""
        size = self._config.rollout.prompts_per_step
        there = tokens_of(self._waiting) / self._budget if self._budget else 0.0
        return max(1, math.ceil(size * (1 - there)))

    def _stays(self, groups: Sequence[Group]) -> Sequence[bool]:
        rewards = [np.array([item.reward for item in group], np.float64) for group in groups]
        return FILTERS[self._filter].keep(rewards, self._config.collect.share).tolist()

    def _missing(self, kept: Sequence[Group]) -> int:
        """Groups still wanted; tokens still wanted are counted in groups of the mean length."""
        size = self._config.rollout.prompts_per_step
        groups = size - len(kept) if FILTERS[self._filter].redraws else 0
        tokens = _tokens(item for item in chain(*kept) if self._trained(item.rollout))
        lacking = self._budget - tokens_of(self._waiting) - tokens
        return groups if lacking <= 0 else max(groups, math.ceil(lacking * len(kept) / tokens) if tokens else size)

    def _chosen(self, found: Collected[Generated]) -> Sequence[Group]:
        """The first groups that stay, in prompt order, all of them where a budget keeps what is too much; the step is whole even if none
        stays: then the first ones drawn are taken, and teach nothing."""
        return (found.kept or found.groups)[: None if self._budget else self._config.rollout.prompts_per_step]

    def _trained(self, rollout: Rollout) -> bool:
        return not (self._config.policy.mask_truncated and rollout.truncated)

    def _shaped(self, scored: Iterable[ScoredRollout]) -> tuple[ScoredRollout, ...]:
        config = self._config.collect
        return penalized(scored, self._longest, config.overlong_cache, config.overlong_weight)


def _tokens(scored: Iterable[ScoredRollout]) -> int:
    return sum(len(item.rollout.token_T) for item in scored)


def _age(sample: Sample, step: int) -> int:
    """Policy updates from the version that sampled it to that after this step: 1 for what was drawn in this step."""
    return step - int(sample.scored.rollout.version_T[0])
