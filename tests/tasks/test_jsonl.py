from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.task import Task, load_task

Write = Callable[..., Path]


def load(tokenizer: Any, path: Path, **settings: Any) -> Task:
    return load_task(TaskConfig(kind="jsonl", path=path, **settings), tokenizer, 1000, 10)


def sums(count: int, start: int = 0) -> list[Any]:
    return [{"prompt": f"{i} + 1", "answer": i + 1, "solution": f"= {i + 1}"} for i in range(start, start + count)]


def texts(prompts: Any) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_columns_are_named_in_the_configuration(tokenizer: Any, write_jsonl: Write):
    rows = [{"q": f"{i}?", "a": "yes", "level": i} for i in range(6)]
    task = load(
        tokenizer, write_jsonl(rows), prompt_column="q", answer_column="a", template="{level}: {prompt}", eval_size=2
    )
    assert task.name == "data"
    assert set(texts(task.train + task.held_out)) == {f"{i}: {i}?" for i in range(6)}
    prompt = task.train[0]
    assert prompt.columns == {"q": prompt.text[3:], "a": "yes", "level": int(prompt.text[0])}
    assert (task.score(prompt, " yes\n"), task.score(prompt, "no")) == (1.0, 0.0)


def test_the_split_is_disjoint_and_a_function_of_the_seed(tokenizer: Any, write_jsonl: Write):
    path = write_jsonl(sums(50))
    task, again, other = (load(tokenizer, path, train_size=30, eval_size=10, seed=seed) for seed in (1, 1, 2))
    assert (len(task.train), len(task.held_out)) == (30, 10)
    assert not set(texts(task.train)) & set(texts(task.held_out))
    assert [prompt.row for prompt in task.train + task.held_out] == list(range(40))
    assert (texts(task.train), texts(task.held_out)) == (texts(again.train), texts(again.held_out))
    assert texts(task.held_out) != texts(other.held_out)
    assert texts(load(tokenizer, path, train_size=35, eval_size=10, seed=1).held_out) == texts(task.held_out)


def test_repeated_prompts_are_one_row(tokenizer: Any, write_jsonl: Write):
    task = load(tokenizer, write_jsonl(sums(10) * 3), train_size=8, eval_size=2)
    assert len(set(texts(task.train)) | set(texts(task.held_out))) == 10


def test_a_small_file_is_split_in_proportion(tokenizer: Any, write_jsonl: Write):
    task = load(tokenizer, write_jsonl(sums(12)), train_size=100, eval_size=50)
    assert (len(task.train), len(task.held_out)) == (8, 4)


def test_evaluation_file_takes_its_prompts_out_of_the_training_rows(tokenizer: Any, write_jsonl: Write):
    path, apart = write_jsonl(sums(20)), write_jsonl(sums(10, start=15), "held.jsonl")
    task = load(tokenizer, path, eval_path=apart, eval_size=3)
    assert set(texts(task.train)) == {f"{i} + 1" for i in range(15)}, "also those of the file that are not evaluated on"
    assert len(task.held_out) == 3 and set(texts(task.held_out)) <= {f"{i} + 1" for i in range(15, 25)}


def test_chat_messages(chat_tokenizer: Any, write_jsonl: Write):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": "1"} for i in range(3)]
    task = load(chat_tokenizer, write_jsonl(rows), eval_size=1, system_prompt="S")
    prompt = task.train[0]
    assert prompt.messages is not None and prompt.messages[0] == {"role": "system", "content": "S"}
    assert prompt.text.endswith("?<|end|><|assistant|>")


def test_rows_with_fewer_columns_get_none(tokenizer: Any, write_jsonl: Write):
    task = load(tokenizer, write_jsonl([*sums(2), {"prompt": "x", "answer": "y"}]), eval_size=0)
    assert {prompt.text: prompt.columns["solution"] for prompt in task.train}["x"] is None


def test_a_column_called_completion_can_hold_the_answer(tokenizer: Any, write_jsonl: Write):
    rows = [{"prompt": f"{i}", "completion": "a"} for i in range(3)]
    task = load(tokenizer, write_jsonl(rows), answer_column="completion", eval_size=1)
    assert task.score(task.train[0], "a") == 1.0


def test_line_separators_in_strings_and_blank_lines(tokenizer: Any, write_jsonl: Write):
    lines = ['{"prompt": "a\u2028b", "answer": 1}', "", '{"prompt": "c", "answer": 1}']
    assert set(texts(load(tokenizer, write_jsonl(lines), eval_size=0).train)) == {"a\u2028b", "c"}


def test_the_answer_column_is_needed_only_where_it_is_scored(tokenizer: Any, write_jsonl: Write):
    path = write_jsonl([{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(TaskError, match=r"line 1 of 'data.jsonl' has no column 'answer'"):
        load(tokenizer, path)
    assert len(load(tokenizer, path, eval_size=0, reward=({"fn": "rewards:mine"},)).train) == 2


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([], {}, r"'data.jsonl' has no rows"),
        (["", "  "], {}, r"'data.jsonl' has no rows"),
        ([*sums(1), '{"prompt": '], {}, r"line 2 of 'data.jsonl' is not valid JSON"),
        ([*sums(2), "[1]"], {}, r"line 3 of 'data.jsonl' is a JSON list"),
        (sums(2), {"prompt_column": "promt"}, r"line 1 of 'data.jsonl' has no column 'promt'; did you mean 'prompt'"),
        (
            sums(2),
            {"answer_column": "zzz"},
            r"no column 'zzz'; it has 'prompt', 'answer', 'solution'.*task.answer_column",
        ),
        ([*sums(1), {"prompt": None, "answer": 1}], {}, r"column 'prompt' is null in line 2"),
        ([{"prompt": 7, "answer": 1}], {}, r"column 'prompt' of line 1 of 'data.jsonl' is a int"),
        ([{"prompt": [], "answer": 1}], {}, r"is an empty list"),
        ([{"prompt": [{"role": "user"}], "answer": 1}], {}, r"line 1 .* a chat message that is not"),
        (sums(1), {}, r"1 different prompts, and none is left for training"),
        (sums(4), {"template": "{level}"}, r"'\{level\}', which line 1 of 'data.jsonl' does not have"),
        (
            [{"prompt": "x" * 995, "answer": 1}] * 2,
            {"eval_size": 0},
            r"row 0 \(line 1 of 'data.jsonl'\) has 996 tokens",
        ),
    ],
)
def test_errors(tokenizer: Any, write_jsonl: Write, lines: list[Any], settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        load(tokenizer, write_jsonl(lines), **settings)


def test_missing_and_unreadable_files(tokenizer: Any, here: Path, write_jsonl: Write):
    with pytest.raises(TaskError, match=r"there is no file 'nowhere.jsonl'"):
        load(tokenizer, Path("nowhere.jsonl"))
    with pytest.raises(TaskError, match=r"there is no file 'held.jsonl'"):
        load(tokenizer, write_jsonl(sums(2)), eval_path=Path("held.jsonl"))
    (here / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(TaskError, match=r"'latin.jsonl' cannot be read as JSON lines in UTF-8"):
        load(tokenizer, Path("latin.jsonl"))
    with pytest.raises(TaskError, match=r"cannot be read"):
        load(tokenizer, here)


def test_an_evaluation_file_that_holds_all_training_rows(tokenizer: Any, write_jsonl: Write):
    with pytest.raises(TaskError, match=r"none is left for training"):
        load(tokenizer, write_jsonl(sums(5)), eval_path=write_jsonl(sums(9), "held.jsonl"))


def test_worked_solutions_of_a_column_leave_the_held_out_rows_alone(tokenizer: Any, write_jsonl: Write):
    task = load(tokenizer, write_jsonl(sums(30)), train_size=10, eval_size=10)
    pairs = task.worked(1000)
    assert len(pairs) == 20, "at most what the file has"
    assert not {prompt.text for prompt, _ in pairs} & set(texts(task.held_out))
    assert all(solution == f"= {int(prompt.text.split()[0]) + 1}" for prompt, solution in pairs)
    assert task.worked(7) == pairs[:7] and len(task.worked(7)) == 7


def test_worked_solutions_of_a_function(tokenizer: Any, write_jsonl: Write, here: Path):
    (here / "solve_mine.py").write_text("def solve(row):\n    return row['prompt'] + ' -> ' + str(row['answer'])\n")
    task = load(tokenizer, write_jsonl(sums(4)), eval_size=1, solution="solve_mine:solve")
    assert all(text == f"{prompt.text} -> {prompt.columns['answer']}" for prompt, text in task.worked(3))


def test_worked_solutions_that_are_not_there(tokenizer: Any, write_jsonl: Write):
    task = load(tokenizer, write_jsonl(sums(4)), eval_size=1, solution_column="steps")
    with pytest.raises(TaskError, match=r"has no worked solutions: there is no column 'steps'"):
        task.worked(2)
    rows = [*sums(3), {"prompt": "x", "answer": 1}]
    with pytest.raises(TaskError, match=r"column 'solution' is null|has no column 'solution'"):
        load(tokenizer, write_jsonl(rows), eval_size=0).worked(4)
