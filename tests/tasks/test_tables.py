"""Rows of Parquet files and of Hugging Face data sets, and presets of known ones, in the layouts that they are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.hf import read_hf
from respec.tasks.task import Task, load_task

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")


def load(tokenizer: Any, **settings: Any) -> Task:
    return load_task(TaskConfig.model_validate(settings), tokenizer, 2000, 10)


def write(path: Path, rows: list[dict[str, Any]], row_group_size: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(start, start + count)]


def texts(prompts: Any) -> set[str]:
    return {prompt.text for prompt in prompts}


def test_a_parquet_file_is_like_a_jsonl_file(tokenizer: Any, here: Path):
    task = load(tokenizer, kind="parquet", path=write(here / "rows.parquet", sums(30)), train_size=15, eval_size=10)
    assert (task.name, len(task.train), len(task.held_out)) == ("rows", 15, 10)
    assert task.score(task.train[0], task.train[0].columns["answer"]) == 1.0


def test_a_folder_of_parquet_files_and_messages_in_them(chat_tokenizer: Any, here: Path):
    for part in range(3):
        rows = [{"prompt": [{"role": "user", "content": f"{part}-{i}?"}], "answer": "1"} for i in range(4)]
        write(here / "rows" / f"{part}.parquet", rows)
    task = load(chat_tokenizer, kind="parquet", path=here / "rows", eval_size=0)
    assert len(task.train) == 12 and task.train[0].messages is not None


def test_what_is_streamed_is_read_no_further_than_asked(tokenizer: Any, here: Path):
    path = write(here / "rows.parquet", sums(2000), row_group_size=100)
    settings: dict[str, Any] = {"kind": "parquet", "path": path, "streaming": True, "train_size": 40, "eval_size": 10}
    task = load(tokenizer, **settings)
    assert texts(task.train + task.held_out) == {f"{i} + 1" for i in range(50)}, "the first rows, in the file's order"
    assert [p.text for p in load(tokenizer, **settings).train] == [p.text for p in task.train]
    # the second half of the file is destroyed: nothing of it is wanted
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 4000] = bytes(4000)
    path.write_bytes(bytes(damaged))
    assert texts(load(tokenizer, **settings).train) == texts(task.train)
    with pytest.raises(TaskError, match=r"cannot be read as Parquet"):
        load(tokenizer, **{**settings, "streaming": False})


def test_a_streamed_data_set_gives_its_first_rows(tokenizer: Any, here: Path, monkeypatch: pytest.MonkeyPatch):
    write(here / "set" / "train-00000-of-00001.parquet", sums(500))
    taken = 0
    original = datasets.IterableDataset.__iter__

    def counting(self: Any) -> Any:
        nonlocal taken
        for row in original(self):
            taken += 1
            yield row

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", counting)
    task = load(tokenizer, kind="hf", dataset="set", streaming=True, train_size=20, eval_size=5)
    assert texts(task.train + task.held_out) == {f"{i} + 1" for i in range(25)} and taken == 25


def gsm8k(folder: Path) -> Path:
    """As openai/gsm8k is published: parquet files in folders main and socratic."""

    def rows(start: int, count: int) -> list[dict[str, Any]]:
        return [
            {
                "question": f"Ann has {i} pens and buys 1000. How many?",
                "answer": f"{i}+1000=<<{i}+1000={i + 1000}>>\n#### {i + 1000:,}",
            }
            for i in range(start, start + count)
        ]

    write(folder / "main" / "train-00000-of-00001.parquet", rows(0, 12))
    write(folder / "main" / "test-00000-of-00001.parquet", rows(12, 5))
    write(folder / "socratic" / "train-00000-of-00001.parquet", rows(100, 3))
    return folder


def test_gsm8k_needs_no_more_than_its_name_and_place(tokenizer: Any, here: Path):
    task = load(tokenizer, preset="gsm8k", dataset=str(gsm8k(here / "gsm8k")))
    assert (len(task.train), len(task.held_out)) == (12, 5)
    prompt = task.held_out[0]
    number = int(prompt.text.split()[2])
    assert prompt.text.startswith(f"Ann has {number} pens") and prompt.text.endswith("final answer within \\boxed{}.")
    assert prompt.columns["answer"] == str(number + 1000), "the commas of thousands are gone"
    for said, right in (
        (f"So it is \\boxed{{{number + 1000}}}.", 1.0),
        (f"\\boxed{{{number}}}", 0.0),
        (f"#### {number + 1000:,}", 1.0),
    ):
        assert task.scorer.math(prompt.columns, said) == right, said
    (worked, solution), *_ = task.worked(3)
    assert isinstance(solution, str) and solution.endswith(f"#### {int(worked.text.split()[2]) + 1000:,}")


def test_a_configuration_of_a_data_sets_card_is_a_subset_too(tokenizer: Any, here: Path):
    folder = gsm8k(here / "gsm8k")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: plain\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    task = load(tokenizer, preset="gsm8k", dataset=str(folder), subset="plain")
    assert len(task.train) == 12


def test_math_takes_the_answer_out_of_its_box(tokenizer: Any, here: Path):
    for subject in ("algebra", "geometry"):
        for split, first in (("train", 0), ("test", 50)):
            rows = [
                {
                    "problem": f"{subject}: half of ${i}$?", "level": "Level 1", "type": subject,
                    "solution": f"Not \\boxed{{0}}. We get $\\boxed{{\\frac{{{i}}}{{2}}}}$.",
                }
                for i in range(first, first + 6)
            ]  # fmt: skip
            write(here / "math" / subject / f"{split}-00000-of-00001.parquet", rows)
    task = load(tokenizer, preset="math", dataset="math", subset="algebra, geometry")
    assert (len(task.train), len(task.held_out)) == (12, 12)
    prompt = next(p for p in task.train if "$3$" in p.text)
    assert prompt.columns["answer"] == "\\frac{3}{2}"
    assert (
        task.scorer.math(prompt.columns, "It is \\boxed{1.5}."),
        task.scorer.math(prompt.columns, "\\boxed{2}"),
    ) == (1.0, 0.0)
    with pytest.raises(TaskError, match=r"has no subset 'number_theory' \(task.subset\)"):
        load(tokenizer, preset="math", dataset="math", subset="algebra, number_theory")


def test_math500_is_evaluated_on_beside_another_task(tokenizer: Any, here: Path):
    rows = [
        {"problem": f"P{i}?", "solution": "s", "answer": f"{i}", "subject": "a", "level": 1, "unique_id": f"{i}"}
        for i in range(9)
    ]
    write(here / "MATH-500" / "test-00000-of-00001.parquet", rows)
    other = {"kind": "parquet", "path": str(write(here / "own.parquet", sums(20))), "eval_size": 4}
    task = load(tokenizer, mixture=[other, {"preset": "math500", "dataset": "MATH-500", "weight": 0.0}])
    assert {p.task for p in task.train} == {"own"} and [p.task for p in task.held_out[:4]] == ["own", "MATH-500"] * 2
    assert len(task.parts["MATH-500"].held_out) == 9


def test_what_save_to_disk_wrote(tokenizer: Any, here: Path):
    datasets.Dataset.from_list(sums(9)).save_to_disk(str(here / "saved"))
    datasets.DatasetDict({"rows": datasets.Dataset.from_list(sums(9))}).save_to_disk(str(here / "dict"))
    assert len(load(tokenizer, kind="hf", dataset="saved", eval_size=3).train) == 6
    assert len(load(tokenizer, kind="hf", dataset="dict", split="rows", eval_size=3).train) == 6
    with pytest.raises(TaskError, match=r"'dict' has no split 'train' \(.*\); it has rows"):
        load(tokenizer, kind="hf", dataset="dict", eval_size=3)


def test_what_is_not_there_is_said_at_once(here: Path, monkeypatch: pytest.MonkeyPatch):
    asked = 0

    def reachable() -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr("respec.models.hub.reachable", reachable)
    for name in ("/nowhere/gsm8k", "./gsm8k", "data/gsm8k/main"):
        with pytest.raises(TaskError, match=f"there is no folder '{name}'"):
            read_hf(TaskConfig(kind="hf", dataset=name), "train")
    assert asked == 0, "a path is no question for the hub"
    with pytest.raises(
        TaskError, match="the hub cannot be reached, there is no such folder, and nothing was fetched before"
    ):
        read_hf(TaskConfig(kind="hf", dataset="nobody/nothing"), "train")
    gsm8k(here / "gsm8k")
    with pytest.raises(TaskError, match=r"subset 'main', split 'valid' cannot be read: .*valid"):
        read_hf(TaskConfig(kind="hf", dataset="gsm8k", subset="main"), "valid")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "absent.parquet"}, "there is no file 'absent.parquet'"),
        ({"path": "empty"}, "no Parquet file in the folder 'empty'"),
        ({"path": "text.parquet"}, "'text.parquet' cannot be read as Parquet"),
        ({"path": "rows.parquet", "prompt_column": "promt"}, r"row 1 of 'rows.parquet' has no column 'promt'; did you mean 'prompt'"),
        ({"path": "rows.parquet", "answer_form": "hashes"}, r"row 1 of 'rows.parquet' holds no answer of the form 'hashes'"),
        ({"path": "rows.parquet", "sampling_columns": ["top_p"]}, r"names 'top_p', and the data has no such column"),
        ({"path": "rows.parquet", "sampling_columns": ["temperature"]}, r"row 3 of 'rows.parquet' is -1.0; as a sampling setting"),
    ],
)  # fmt: skip
def test_errors(tokenizer: Any, here: Path, settings: dict[str, Any], message: str):
    (here / "empty").mkdir()
    (here / "text.parquet").write_text("prompt,answer")
    write(here / "rows.parquet", [{**row, "temperature": -1.0 if i == 2 else None} for i, row in enumerate(sums(9))])
    with pytest.raises(TaskError, match=message):
        load(tokenizer, kind="parquet", **settings)


def test_sampling_columns_become_the_rows_own_settings(tokenizer: Any, here: Path):
    rows = [{**row, "temperature": None if i % 2 else 0.5, "max_new_tokens": 7} for i, row in enumerate(sums(4))]
    task = load(
        tokenizer,
        kind="parquet",
        path=write(here / "rows.parquet", rows),
        eval_size=0,
        sampling_columns=["temperature", "max_new_tokens"],
    )
    own = {prompt.text: prompt.sampling for prompt in task.train}
    assert own["0 + 1"] == {"temperature": 0.5, "max_new_tokens": 7} and own["1 + 1"] == {"max_new_tokens": 7}


def test_held_out_rows_of_their_own_file_need_no_sampling_columns(tokenizer: Any, here: Path):
    write(here / "train.parquet", [{**row, "temperature": 0.5} for row in sums(8)])
    held = [{"prompt": f"{i} + 7", "answer": f"{i + 7}"} for i in range(3)]
    write(here / "test.parquet", held)
    paths = {"path": "train.parquet", "eval_path": "test.parquet"}
    task = load(tokenizer, kind="parquet", sampling_columns=["temperature"], **paths)
    assert {prompt.sampling["temperature"] for prompt in task.train} == {0.5}
    assert len(task.held_out) == 3 and not any(prompt.sampling for prompt in task.held_out)
