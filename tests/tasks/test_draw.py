from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from respec.config import RewardConfig, TaskConfig
from respec.errors import TaskError
from respec.tasks.gym import make_rows, open_dataset
from respec.tasks.process import WorkerProcess
from respec.tasks.task import load_task

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 10 x 2 x 10 different expressions


def load(tokenizer: Any, dataset: str = "chain_sum", **settings: Any) -> Any:
    sizes = {"train_size": 8, "eval_size": 4}
    return load_task(TaskConfig(dataset=dataset, **{**sizes, **settings}), tokenizer, 4096, 16)


def texts(prompts: Any) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_train_and_held_out_never_overlap_even_when_they_take_all_there_is(tokenizer: Any):
    task = load(tokenizer, params=SMALL, train_size=140, eval_size=60, solution="respec.tasks.worked:chain_sum")
    assert (len(task.train), len(task.held_out)) == (140, 60)
    assert len(set(texts(task.train)) | set(texts(task.held_out))) == 200
    assert [prompt.row for prompt in (*task.train, *task.held_out)] == list(range(200))
    pairs = task.worked(140)
    assert set(texts(prompt for prompt, _ in pairs)) == set(texts(task.train)), "all but the held-out ones"
    assert min(prompt.row for prompt, _ in pairs) == 200


def test_too_few_different_prompts_says_how_many_there_are(tokenizer: Any):
    with pytest.raises(TaskError, match=r"task.train_size asks for 141 .* only 140 besides the 60 held-out"):
        load(tokenizer, params=SMALL, train_size=141, eval_size=60)
    with pytest.raises(TaskError, match=r"task.eval_size asks for 300 .* only 200;"):
        load(tokenizer, params=SMALL, eval_size=300)
    with pytest.raises(TaskError, match=r"warmup.train_size asks for 197 .* only 196 besides"):
        load(tokenizer, params=SMALL, solution="respec.tasks.worked:chain_sum").worked(197)


def test_rows_are_a_function_of_the_seed(tokenizer: Any):
    first, again, other = (load(tokenizer, seed=seed) for seed in (3, 3, 4))
    assert texts(first.train) == texts(again.train) and texts(first.held_out) == texts(again.held_out)
    assert not set(texts(first.train)) & set(texts(other.train))


def test_held_out_rows_do_not_depend_on_train_size(tokenizer: Any):
    assert texts(load(tokenizer, train_size=20).held_out) == texts(load(tokenizer).held_out)


def test_rows_are_the_same_in_every_process(tokenizer: Any):
    # reasoning-gym's isomorphic_strings walks through sets of strings, whose order Python changes from process to process.
    code = (
        "import reasoning_gym as g; d = g.create_dataset('isomorphic_strings', seed=1, size=20); "
        "print([d[i]['question'] for i in range(20)])"
    )
    raw = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(raw) == 2, "the hazard is gone; this test has lost its point"
    assert texts(load(tokenizer, "isomorphic_strings").train) == texts(load(tokenizer, "isomorphic_strings").train)


def test_question_answer_and_metadata_fill_the_template(tokenizer: Any):
    task = load(tokenizer, template="{expression} ({num_terms}) = {answer}? {question}")
    prompt = task.train[0]
    meta = prompt.columns["metadata"]
    assert prompt.text == (
        f"{meta['expression']} ({meta['num_terms']}) = {prompt.columns['answer']}? {prompt.columns['question']}"
    )


@pytest.mark.parametrize("dataset", ["prime_factorization", "graph_color", "family_relationships", "string_insertion"])
def test_datasets_of_many_kinds_score_their_own_answers(tokenizer: Any, dataset: str):
    task = load(tokenizer, dataset, train_size=3, eval_size=1)
    for prompt in task.train:
        answer = prompt.columns["answer"]
        assert answer is None or task.score(prompt, answer) == 1.0
        assert task.score(prompt, "garbage xx") < 0.1


def test_composite_takes_plain_tables(tokenizer: Any):
    specs = [{"name": "chain_sum", "weight": 1.0}, {"name": "lcm", "weight": 1.0, "config": {"min_numbers": 2}}]
    task = load(tokenizer, "composite", params={"datasets": specs})
    assert {prompt.columns["metadata"]["source_dataset"] for prompt in task.train} == {"chain_sum", "lcm"}
    assert all(task.score(prompt, prompt.columns["answer"]) == 1.0 for prompt in task.train)


def test_rows_without_an_answer_cannot_be_compared(tokenizer: Any):
    with pytest.raises(TaskError, match=r"'math' compares with .*'graph_color' has rows without one.*fn = 'task'"):
        load(tokenizer, "graph_color", train_size=1, eval_size=0, reward=(RewardConfig(fn="math"),))


def test_the_least_reward_counts_weights_and_fallback_values(tokenizer: Any):
    rewards = (
        RewardConfig(weight=2.0, fallback=-0.5),
        RewardConfig(fn="math", weight=-3.0),
        RewardConfig(fn="any:thing", weight=-1.0, fallback=0.25),
    )
    assert load(tokenizer, train_size=1, eval_size=0, reward=rewards).reward_min == -1.0 - 3.0 - 0.25


def test_no_more_rows_are_made_than_are_missing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    # A futoshiki row takes a quarter of a second and more.
    made = []
    ask = WorkerProcess.ask

    def watched(self: WorkerProcess, kind: str, payload: Any, limit_s: float) -> Any:
        if kind == "rows":
            made.append(payload[1] - payload[0])
        return ask(self, kind, payload, limit_s)

    monkeypatch.setattr(WorkerProcess, "ask", watched)
    load(tokenizer, "lcm", train_size=3, eval_size=1)
    assert sum(made) <= 8


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("qqqqqqqqqq", {}, r"no dataset 'qqqqqqqqqq'"),
        ("chain_sum", {"max_term": 3}, r"task.params.max_term: .*'chain_sum' has no such .*did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, r"'chain_sum' refuses .*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, r"'chain_sum' refuses .*TypeError"),
        ("composite", {"datasets": [{"name": "nope", "weight": 1.0}]}, r"'composite' refuses .*'nope' not registered"),
        ("chain_sum", {"seed": 3}, r"task.params.seed is not .* use task.seed"),
        ("chain_sum", {"size": 3}, r"task.params.size is not .* use task.train_size"),
    ],
)
def test_datasets_that_cannot_be_opened(name: str, params: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        open_dataset(name, params, 0, 1)


def test_parameters_that_show_only_when_rows_are_made():
    with pytest.raises(TaskError, match=r"failed to make a row with these task.params"):
        make_rows(open_dataset("chain_sum", {"min_terms": 2.5, "max_terms": 2.5}, 0, 1), 0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, r"no dataset 'chain_sums'; did you mean 'chain_sum'"),
        ({"template": "{expresion}"}, r"'\{expresion\}', which a row of 'chain_sum' does not have; .*'\{expression\}'"),
    ],
)
def test_errors_of_the_worker_come_back_as_they_are(tokenizer: Any, settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        load(tokenizer, **settings)


def test_a_generated_prompt_too_long_for_the_context(tokenizer: Any):
    config = TaskConfig(dataset="chain_sum", train_size=2, eval_size=1)
    with pytest.raises(
        TaskError, match=r"row 0 \(a row of 'chain_sum'\) has \d+ tokens.*context of 40 less 16 .*room for 24"
    ):
        load_task(config, tokenizer, 40, 16)
