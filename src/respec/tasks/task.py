"""A task: prompts to train on, prompts held out, worked solutions for the warm-up, and the dataset's own scorer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from respec.config import TaskConfig
from respec.errors import ConfigError, TaskError
from respec.tasks.columns import need, scored_column
from respec.tasks.draw import draw
from respec.tasks.episodes import load_episodes
from respec.tasks.functions import resolve_function
from respec.tasks.mixture import mix
from respec.tasks.process import WorkerProcess
from respec.tasks.render import Rendered, Renderer
from respec.tasks.scorer import BUILT_IN, Scorer
from respec.tasks.split import shuffled_for
from respec.tasks.table import read_split
from respec.types import Partner, Prompt, Shown


@dataclass(frozen=True)
class Task:
    """What `load_task` makes; read by the loop, the warm-up and the reward worker.

    `train` holds rows 0..n-1 and `held_out` the rows after them; no prompt text is in both, and none is twice in either.
    `reward_min` is the least reward that the configured rewards declare, weights applied: built-in ones are in [0, 1], a
    fallback value is itself, and a user function declares nothing and counts as 0. `notes` are lines for the user about the data. Where
    completions are episodes, `episodes` makes the environments of one rollout, which give the rewards too and declare no least one.

    Of a mixture, `parts` are its tasks by name, with the row ids that they have in the mixture, and `held_out` takes from all in turn.
    """

    name: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    reward_min: float
    scorer: Scorer
    solve: Callable[[int], tuple[tuple[Prompt, str | Shown], ...]]
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Task] = field(default_factory=dict)
    episodes: Callable[[], Partner] | None = None

    def score(self, prompt: Prompt, completion: str) -> float:
        """The dataset's own score of a completion, in [0, 1]. In this process and without a time limit."""
        return self.part_of(prompt).scorer.task(prompt.columns, completion)

    def part_of(self, prompt: Prompt) -> Task:
        """The task of a mixture that a prompt is of, or this one itself."""
        return self.parts.get(prompt.task, self)

    def worked(self, n: int) -> tuple[tuple[Prompt, str | Shown], ...]:
        """`n` prompts with their worked solutions, none of them held out; of a file or data set, at most what it has.

        Row ids go on after the held-out rows. Raises TaskError if the task has no worked solutions, if one cannot be
        made, or if a generated dataset has too few different prompts.
        """
        return self.solve(n)


def load_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase, context_length: int, max_new_tokens: int) -> Task:
    """Reads or draws the rows, renders and tokenizes them, and checks that each fits. Deterministic in `config.seed`.

    Raises TaskError for data that cannot be used and ConfigError for a bad `answer_pattern` or `solution`; both before
    any model has run.
    """
    if config.mixture:
        return mix(config, lambda section: load_task(section, tokenizer, context_length, max_new_tokens))
    _check_pattern(config.answer_pattern)
    solution = resolve_function(config.solution, "task.solution") if config.solution else None
    renderer = Renderer(config, tokenizer, context_length, max_new_tokens)
    if config.kind == "env":
        rows = load_episodes(config, renderer, tokenizer)
        nothing = Scorer("answer")
        return Task(config.env, rows.train, rows.held_out, float("-inf"), nothing, rows.solve, episodes=rows.episodes)
    if config.kind == "reasoning_gym":
        return _load_gym(config, renderer, solution)
    return _load_table(config, renderer, solution)


def _load_gym(config: TaskConfig, renderer: Renderer, solution: Callable[..., Any] | None) -> Task:
    with closing(WorkerProcess()) as process:
        held = draw(process, config, renderer, "held-out", config.eval_size, frozenset(), "task.eval_size")
        held_texts = frozenset(item.text for item in held)
        train = draw(process, config, renderer, "train", config.train_size, held_texts, "task.train_size")
    if any(reward.fn == "math" for reward in config.reward):
        for item in (*train, *held):
            if item.row.columns["answer"] is None:
                raise TaskError(
                    f"task.reward 'math' compares with the row's answer, but reasoning-gym's '{config.dataset}' has rows "
                    "without one, since many answers are right; use the dataset's own scorer, fn = 'task'"
                )

    def solve(n: int) -> tuple[tuple[Prompt, str], ...]:
        if solution is None:
            raise TaskError(
                f"reasoning-gym's '{config.dataset}' comes without worked solutions; set task.solution = 'module:function' "
                "(for chain_sum 'respec.tasks.worked:chain_sum'), or warmup.steps = 0"
            )
        solver = solution
        with closing(WorkerProcess()) as process:
            rows = draw(process, config, renderer, "worked", n, held_texts, "warmup.train_size")
        return _pair(
            rows,
            renderer,
            len(train) + len(held),
            lambda item: _solved(solver, config.solution, item, item.row.columns),
        )

    scorer = Scorer("answer", config.answer_pattern, config.dataset, config.params)
    return _task(config, config.dataset, train, held, renderer, scorer, solve)


def _load_table(config: TaskConfig, renderer: Renderer, solution: Callable[..., Any] | None) -> Task:
    sides = read_split(config, renderer)

    def solve(n: int) -> tuple[tuple[Prompt, str], ...]:
        def text(item: Rendered) -> str:
            if solution is not None:
                return _solved(solution, config.solution, item, item.row.fields)
            value = need(item.row.fields, config.solution_column, "solution_column", item.row.place)
            return _text(value, f"column '{config.solution_column}'", item)

        chosen = shuffled_for("worked", sides.rest, config.seed)[:n]
        if solution is None and not any(config.solution_column in item.row.fields for item in chosen):
            raise TaskError(
                f"'{_source(config)}' has no worked solutions: there is no column '{config.solution_column}' "
                "(task.solution_column), and task.solution names no function; set either, or warmup.steps = 0"
            )
        return _pair(chosen, renderer, len(sides.train) + len(sides.held), text)

    scorer = Scorer(scored_column(config), config.answer_pattern)
    name = config.path.stem if config.path is not None else Path(config.dataset).name
    return _task(config, name, sides.train, sides.held, renderer, scorer, solve, sides.notes(config))


def _source(config: TaskConfig) -> str:
    return str(config.path or config.dataset)


def _task(
    config: TaskConfig,
    name: str,
    train: tuple[Rendered, ...],
    held: tuple[Rendered, ...],
    renderer: Renderer,
    scorer: Scorer,
    solve: Callable[[int], tuple[tuple[Prompt, str | Shown], ...]],
    notes: tuple[str, ...] = (),
) -> Task:
    least = sum(
        min(0.0, reward.weight * (reward.fn in BUILT_IN), reward.weight * (reward.fallback or 0.0))
        for reward in config.reward
    )
    prompts = renderer.prompts(train, 0)
    held_out = renderer.prompts(held, len(train))
    return Task(name, prompts, held_out, float(least), scorer, solve, (*notes, *renderer.notes()))


def _pair(
    rows: tuple[Rendered, ...], renderer: Renderer, first_row: int, text: Callable[[Rendered], str]
) -> tuple[tuple[Prompt, str], ...]:
    return tuple((prompt, text(item)) for prompt, item in renderer.fitting(rows, first_row))


def _solved(solution: Callable[..., Any], spec: str, item: Rendered, row: Mapping[str, Any]) -> str:
    try:
        value = solution(dict(row))
    except Exception as error:
        raise TaskError(
            f"task.solution '{spec}' raised {type(error).__name__}: {error} on {item.row.place}, prompt "
            f"{item.text[:80]!r}; mend the function"
        ) from error
    return _text(value, f"task.solution '{spec}'", item)


def _text(value: Any, source: str, item: Rendered) -> str:
    if isinstance(value, str) and value:
        return value
    got = "an empty text" if value == "" else f"a {type(value).__name__}"
    raise TaskError(f"{source} gave {got} on {item.row.place}, prompt {item.text[:80]!r}; a solution must be text")


def _check_pattern(pattern: str) -> None:
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"task.answer_pattern {pattern!r} is not a regular expression: {error}") from None
    if groups < 1:
        raise ConfigError(
            f"task.answer_pattern {pattern!r} has no group; put parentheses round the answer, as in 'Answer: (.+)'"
        )
