"""Gymnasium's environments as text: an action by its name or number, an observation as the environment writes it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from respec.envs.protocol import chosen, refusal
from respec.errors import TaskError


class GymnasiumEnv:
    """`gymnasium.make(id, **options)` for environments with a discrete action space.

    `actions` names its actions in their order; without it they are their numbers. What is read is `render()` where
    `options.render_mode` is "ansi", else the observation as Python writes it. `prompt` goes before the first. A text that names no
    action moves nothing and costs `penalty`. `solved`: the return reached `solved_at`, by default the environment's own reward threshold, or 1.
    Only `seed` decides an episode: samples of one prompt meet the same chances.
    """

    hidden = True

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        prompt: str = "",
        penalty: float = 0.0,
        solved_at: float | None = None,
    ) -> None:
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError:
            raise TaskError(
                "task.env = 'gymnasium' needs the package gymnasium, which is not installed; run: pip install gymnasium"
            ) from None
        try:
            self._env = gymnasium.make(id, **(options or {}))
        except Exception as error:
            raise TaskError(
                f"gymnasium cannot make '{id}': {type(error).__name__}: {error}; mend task.params.id or task.params.options"
            ) from error
        space = self._env.action_space
        if not hasattr(space, "n"):
            raise TaskError(
                f"gymnasium's '{id}' has the action space {space}; only discrete ones can be named in words"
            )
        count, self._first = int(space.n), int(getattr(space, "start", 0))
        self.actions = tuple(actions) or tuple(str(self._first + i) for i in range(count))
        if len(self.actions) != count:
            raise TaskError(f"gymnasium's '{id}' has {count} actions, task.params.actions names {len(self.actions)}")
        threshold = getattr(getattr(self._env, "spec", None), "reward_threshold", None)
        self._solved_at = solved_at if solved_at is not None else threshold if threshold is not None else 1.0
        self._ansi = (options or {}).get("render_mode") == "ansi"
        self._prompt, self._penalty, self._total, self._seen = prompt, penalty, 0.0, ""

    @property
    def solved(self) -> bool:
        return self._total >= self._solved_at

    def reset(self, seed: int) -> str:
        observation, _ = self._env.reset(seed=seed)
        self._total, self._seen = 0.0, self._text(observation)
        return self._prompt + self._seen

    def step(self, text: str) -> tuple[str, float, bool]:
        action = chosen(text, self.actions)
        if action is None:
            self._total -= self._penalty
            return f"{refusal(self.actions)}\n{self._seen}", -self._penalty, False
        observation, reward, terminated, truncated, _ = self._env.step(self._first + self.actions.index(action))
        self._total += float(reward)
        self._seen = self._text(observation)
        return self._seen, float(reward), bool(terminated or truncated)

    def _text(self, observation: Any) -> str:
        return str(self._env.render() if self._ansi else observation).strip("\n")
