"""The section of prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from respec.config.room import Room


class RewardConfig(Room):
    """One reward: `task` (the dataset's own scorer), `math` (math-verify against a column), or `module:function`."""

    fn: str = "task"
    weight: float = 1.0
    timeout_s: float = Field(default=30.0, gt=0)
    fallback: float | None = Field(
        default=None, description="used, counted and shown when the function fails; without it: an error"
    )


class TaskConfig(Room):
    """Prompts and rewards.

    kind `reasoning_gym`: `dataset` names it, `params` are its parameters. kind `jsonl`: `path` (and `eval_path`, or a split of
    `path`), `prompt_column` (text, or a list of chat messages), `answer_column`, `solution_column` for the warm-up.
    kind `env`: `env` is an environment that a completion is an episode in, `params` are its parameters; it gives the rewards itself.
    """

    kind: Literal["reasoning_gym", "jsonl", "env"] = "reasoning_gym"
    dataset: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    env: str = Field(
        default="", description="bandit, frozen_lake, sokoban, gymnasium, tools, or `module:Class` of your own"
    )
    max_turns: int = Field(default=10, ge=1, description="env: turns of an episode")
    turn_template: str = Field(
        default="\n{observation}\n",
        description="env: what follows a turn, where no chat template does; {observation} is the environment's text",
    )
    solver_noise: float = Field(
        default=0.0, ge=0, le=1, description="env: share of random actions in the solver's episodes that a warm-up sees"
    )
    path: Path | None = None
    eval_path: Path | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    solution_column: str = "solution"
    train_size: int = Field(default=1024, ge=1)
    eval_size: int = Field(default=512, ge=0)
    seed: int = Field(default=0, description="of the training rows; held-out rows are drawn apart and never overlap")
    template: str = Field(default="{prompt}", description="the prompt's text; {prompt} and any column by name")
    answer_pattern: str = Field(
        default="", description="regular expression; its last match's group 1 is the answer that is scored"
    )
    solution: str = Field(default="", description="`module:function` giving a row's worked solution, for the warm-up")
    chat: Literal["auto", "never", "always"] = Field(
        default="auto", description="auto: when the tokenizer has a chat template"
    )
    system_prompt: str = ""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    reward: tuple[RewardConfig, ...] = (RewardConfig(),)

    @model_validator(mode="after")
    def _needs(self) -> TaskConfig:
        if self.kind == "reasoning_gym" and not self.dataset:
            raise ValueError("task.dataset is empty; name a reasoning-gym dataset, for example 'chain_sum'")
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path is empty; task.kind = 'jsonl' needs the path of a JSON-lines file")
        if self.kind == "env" and not self.env:
            raise ValueError("task.env is empty; name an environment, for example 'frozen_lake'")
        if self.kind == "env" and self.reward != (RewardConfig(),):
            raise ValueError("task.reward is set, but an environment gives its rewards itself; remove [[task.reward]]")
        if "{observation}" not in self.turn_template:
            raise ValueError(f"task.turn_template has no {{observation}}, got {self.turn_template!r}")
        return self
