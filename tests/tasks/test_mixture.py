"""Several tasks in one run: rows of their own, rewards of their own, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from respec.config import TaskConfig, parse_config
from respec.errors import ConfigError, RewardError, TaskError
from respec.tasks.mixed_reward import MixedReward, reward_of
from respec.tasks.reward import RewardWorker
from respec.tasks.task import Task, load_task

Write = Callable[..., Path]
MODULE = """
def long(completions, **kwargs):
    return [float(len(text)) for text in completions]

def fails(completions, **kwargs):
    raise ValueError("no")
"""


def config(*parts: dict[str, Any], **settings: Any) -> TaskConfig:
    return TaskConfig.model_validate({"mixture": parts, **settings})


@pytest.fixture
def sums(write_jsonl: Write, here: Path) -> Callable[..., dict[str, Any]]:
    (here / "mixed_rewards.py").write_text(MODULE)

    def make(stem: str, count: int = 12, **settings: Any) -> dict[str, Any]:
        rows = [
            {"prompt": f"{stem} {i} plus one", "answer": str(i + 1), "solution": f"= {i + 1}"} for i in range(count)
        ]
        return {"kind": "jsonl", "path": str(write_jsonl(rows, f"{stem}.jsonl")), "eval_size": 4, **settings}

    return make


def load(tokenizer: Any, asked: TaskConfig) -> Task:
    return load_task(asked, tokenizer, 1000, 10)


def test_rows_have_ids_of_the_mixture_and_the_first_held_out_ones_are_of_all_tasks(tokenizer: Any, sums: Any):
    task = load(tokenizer, config(sums("a"), sums("b", eval_size=2), sums("c", name="third")))
    assert task.name == "a+b+third" and set(task.parts) == {"a", "b", "third"}
    assert sorted(p.row for p in task.train + task.held_out) == list(range(36))
    assert [p.task for p in task.held_out[:5]] == ["a", "b", "third", "a", "b"]
    assert all(p.text.startswith({"a": "a", "b": "b", "third": "c"}[p.task]) for p in task.train)
    assert task.score(task.held_out[1], task.held_out[1].columns["answer"]) == 1.0


def test_each_task_is_scored_by_its_own_rewards(tokenizer: Any, sums: Any, make: Any):
    asked = config(sums("a"), sums("b", reward=({"fn": "mixed_rewards:long", "weight": 2.0}, {"fn": "task"})))
    task = load(tokenizer, asked)
    one, two = (next(p for p in task.train if p.task == name) for name in ("a", "b"))
    rollouts = [
        make.rollout(two, "12345"),
        make.rollout(one, one.columns["answer"]),
        make.rollout(two, two.columns["answer"], 1),
    ]
    with reward_of(task, asked) as reward:
        assert isinstance(reward, MixedReward)
        assert reward.names == ("a/task", "b/mixed_rewards:long", "b/task")
        scored = reward.score(rollouts)
    assert [s.rollout for s in scored] == rollouts
    assert scored[0].part == {"b/mixed_rewards:long": 5.0, "b/task": 0.0} and scored[0].reward == 10.0
    assert scored[1].part == {"a/task": 1.0} and scored[1].reward == 1.0
    assert scored[2].part["b/task"] == 1.0
    alone = TaskConfig.model_validate(sums("a"))
    assert isinstance(reward_of(load(tokenizer, alone), alone), RewardWorker)


def test_a_failing_reward_is_its_tasks_own(tokenizer: Any, sums: Any, make: Any):
    asked = config(sums("a"), sums("b", reward=({"fn": "mixed_rewards:fails"},)))
    task = load(tokenizer, asked)
    one, two = (next(p for p in task.train if p.task == name) for name in ("a", "b"))
    with MixedReward(task, asked) as reward:
        assert reward.score([make.rollout(one, "x")])[0].reward == 0.0
        with pytest.raises(RewardError, match="'mixed_rewards:fails' raised ValueError"):
            reward.score([make.rollout(two, "x")])


def test_what_one_task_holds_out_no_other_trains_on(tokenizer: Any, sums: Any):
    first, second = sums("a", 30, eval_size=8), sums("b", 30, eval_size=8)
    second["path"] = first["path"]
    second |= {"name": "again", "seed": 1}
    task = load(tokenizer, config(first, second))
    held = {p.text for p in task.held_out}
    assert held and not held & {p.text for p in task.train}
    assert sum("held out by another task of the mixture" in note for note in task.notes) == 2


def test_worked_solutions_come_from_all_that_have_some(tokenizer: Any, sums: Any):
    task = load(
        tokenizer, config(sums("a", 30, weight=3.0), sums("b", 30), sums("c", solution_column="none", weight=2.0))
    )
    pairs = task.worked(12)
    assert [sum(p.text.startswith(name) for p, _ in pairs) for name in "abc"] == [6, 2, 0]
    with pytest.raises(TaskError, match="no task of the mixture has worked solutions: c: "):
        load(tokenizer, config(sums("c", solution_column="none"))).worked(5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": [{"dataset": "a"}, {"dataset": "a"}]}, "need different names without '/', got a, a"),
        ({"mixture": [{"dataset": "a"}], "dataset": "b"}, "has a mixture and data or rewards of its own"),
        ({"mixture": [{"dataset": "a", "weight": 0.0}]}, "all tasks of the mixture have weight 0"),
        ({"mixture": [{"name": "a", "mixture": [{"dataset": "b"}]}]}, "a task of a mixture has a mixture"),
        ({"mixture": [{"dataset": "a"}], "stage": [{"from_step": 2, "weights": {"a": 1.0}}]}, "must begin with 1 and ascend"),
        ({"mixture": [{"dataset": "a"}], "stage": [{"from_step": 1, "weights": {"b": 1.0}}]}, "no task 'b'; its tasks are a"),
        ({"mixture": [{"dataset": "a"}], "stage": [{"from_step": 1, "weights": {}}]}, "weights must not be negative nor all 0"),
        (
            {"mixture": [{"dataset": "a", "weight": 0.0}, {"dataset": "b"}], "stage": [{"from_step": 1, "weights": {"a": 1.0}}]},
            "'a' has weight 0, and is only evaluated on",
        ),
        ({"dataset": "a", "stage": [{"from_step": 1, "weights": {"a": 1.0}}]}, "there is none; add"),
        ({"dataset": "a", "streaming": True}, "streaming is of kinds 'parquet' and 'hf'"),
        ({"dataset": "a", "difficulty": {"low": 0.9, "high": 0.1}}, "the band is empty"),
        ({"dataset": "a", "preset": "gsm9k"}, "there is no 'gsm9k'; known: gsm8k, math, math500"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": {"path": "x"}, "task": settings})
