"""The section of prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from respec.config.mixture import DifficultyConfig, SamplingColumn, StageConfig
from respec.config.presets import PRESETS, filled
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
    """Prompts and rewards; docs/data.md has an example of each.

    kind `reasoning_gym`: `dataset` names it, `params` are its parameters. kinds `jsonl` and `parquet`: `path` (and `eval_path`, or a
    split of `path`). kind `hf`: `dataset` is a folder or a hub id, `subset` its configuration, `split` and `eval_split` its splits. These three
    have `prompt_column` (text, or a list of chat messages), `answer_column`, `solution_column` for the warm-up. A `preset` fills in
    what a known data set needs. kind `env`: `env` is an environment that a completion is an episode in, `params` are its parameters; it gives the
    rewards itself. With a `mixture` of tasks nothing of the section itself is read but `stage` and `difficulty`.
    """

    kind: Literal["reasoning_gym", "jsonl", "parquet", "hf", "env"] = "reasoning_gym"
    preset: str = Field(
        default="", description="gsm8k, math or math500: columns, answers and reward of a known data set"
    )
    name: str = Field(default="", description="in metrics of a mixture; empty takes that of the data")
    weight: float = Field(default=1.0, ge=0, description="in a mixture: prompts in proportion; 0: only evaluated on")
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
    subset: str = Field(
        default="", description="kind hf: the data set's configuration, or a folder in it; several with commas"
    )
    split: str = "train"
    eval_split: str = Field(
        default="", description="kind hf: the split of held-out rows; empty takes them from `split`"
    )
    streaming: bool = Field(
        default=False, description="kinds parquet and hf: read no more than the first train_size + eval_size rows"
    )
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    answer_form: Literal["plain", "hashes", "boxed"] = Field(
        default="plain", description="of the answer column: the answer itself, behind '####', or in the last \\boxed{}"
    )
    solution_column: str = "solution"
    sampling_columns: tuple[SamplingColumn, ...] = Field(
        default=(), description="columns that override [rollout] for their row; an empty value overrides nothing"
    )
    train_size: int = Field(default=1024, ge=1)
    eval_size: int = Field(default=512, ge=0)
    seed: int = Field(default=0, description="of the training rows; held-out rows are drawn apart and never overlap")
    leakage: Literal["remove", "remove_near", "keep"] = Field(
        default="remove",
        description="training rows that are held out too: removed, near copies as well, or only counted",
    )
    overlong: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="prompts that leave no room for max_new_tokens"
    )
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
    mixture: tuple[TaskConfig, ...] = ()
    stage: tuple[StageConfig, ...] = ()
    difficulty: DifficultyConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, tree: Any) -> Any:
        return filled(tree)

    @model_validator(mode="after")
    def _needs(self) -> TaskConfig:
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"task.preset: there is no '{self.preset}'; known: {', '.join(PRESETS)}")
        if self.mixture:
            self._mixes()
            return self
        if self.stage:
            raise ValueError(
                "task.stage changes the weights of a mixture, and there is none; add [[task.mixture]] sections"
            )
        if self.kind == "reasoning_gym" and not self.dataset:
            raise ValueError("task.dataset is empty; name a reasoning-gym dataset, for example 'chain_sum'")
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path is empty; task.kind = 'jsonl' needs the path of a JSON-lines file")
        if self.kind == "parquet" and self.path is None:
            raise ValueError(
                "task.path is empty; task.kind = 'parquet' needs the path of a Parquet file or of a folder of them"
            )
        if self.kind == "hf" and not self.dataset:
            raise ValueError(
                "task.dataset is empty; task.kind = 'hf' needs a folder or a hub id, for example 'openai/gsm8k'"
            )
        if self.streaming and self.kind not in ("parquet", "hf"):
            raise ValueError(f"task.streaming is of kinds 'parquet' and 'hf', got kind '{self.kind}'; leave it out")
        if self.kind == "env" and not self.env:
            raise ValueError("task.env is empty; name an environment, for example 'frozen_lake'")
        if self.kind == "env" and self.reward != (RewardConfig(),):
            raise ValueError("task.reward is set, but an environment gives its rewards itself; remove [[task.reward]]")
        if "{observation}" not in self.turn_template:
            raise ValueError(f"task.turn_template has no {{observation}}, got {self.turn_template!r}")
        return self

    def _mixes(self) -> None:
        """Raises ValueError for a mixture that does not fit together."""
        names = self.names
        if self.dataset or self.path is not None or self.reward != (RewardConfig(),):
            raise ValueError(
                "task has a mixture and data or rewards of its own; put them into a [[task.mixture]] section"
            )
        if any(part.kind == "env" for part in self.mixture):
            raise ValueError("an environment cannot be a task of a mixture; give it a run of its own")
        if any(part.mixture or part.stage or part.difficulty for part in self.mixture):
            raise ValueError("a task of a mixture has a mixture, stage or difficulty of its own; set them in [task]")
        if len(set(names)) < len(names) or any(not name or "/" in name for name in names):
            raise ValueError(
                f"the tasks of a mixture need different names without '/', got {', '.join(names)}; set their `name`"
            )
        if not any(part.weight for part in self.mixture):
            raise ValueError("all tasks of the mixture have weight 0; give one a weight")
        steps = [stage.from_step for stage in self.stage]
        if steps and (steps[0] != 1 or steps != sorted(set(steps))):
            raise ValueError(f"task.stage: from_step must begin with 1 and ascend, got {steps}")
        for stage in self.stage:
            unknown = [name for name in stage.weights if name not in names]
            if unknown:
                raise ValueError(
                    f"task.stage: the mixture has no task '{unknown[0]}'; its tasks are {', '.join(names)}"
                )
            unused = [
                name
                for name, part in zip(names, self.mixture, strict=True)
                if stage.weights.get(name) and not part.weight
            ]
            if unused:
                raise ValueError(
                    f"task.stage: task '{unused[0]}' has weight 0, and is only evaluated on; give it a weight"
                )
            if min(stage.weights.values(), default=0) < 0 or not any(stage.weights.values()):
                raise ValueError(f"task.stage: weights must not be negative nor all 0, got {stage.weights}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks of the mixture."""
        return tuple(part.name or _name_of(part) for part in self.mixture)


def _name_of(part: TaskConfig) -> str:
    return part.path.stem if part.path is not None else part.dataset.rstrip("/").rpartition("/")[2]
