"""Training rows that are held out too: found, said, and removed as the configuration says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from respec.config import TaskConfig
from respec.tasks.leakage import find_leaks
from respec.tasks.render import Rendered, Row
from respec.tasks.task import Task, load_task

Write = Callable[..., Path]
STORY = "Natalia sold clips to {n} of her friends in April, and then she sold half as many clips in May. How many did she sell in all?"


def row(text: Any) -> Rendered:
    return Rendered(Row(text, {}, {}, text if isinstance(text, str) else ""), str(text), None, False)


def found(train: list[Any], held: list[Any]) -> tuple[int, int, int]:
    leaks = find_leaks([row(text) for text in train], [row(text) for text in held])
    return len(leaks.same), len(leaks.alike), len(leaks.near)


def test_case_spaces_and_the_punctuation_of_sentences_hide_no_copy():
    assert found(["What is 2 + 2?"], ["What is 2 + 2?"]) == (1, 0, 0)
    assert found(["what is\n2+2"], ["What is 2 + 2?"]) == (0, 1, 0)
    assert found(["ﬁnd  X"], ["Find x."]) == (0, 1, 0), "compatible characters too"
    assert found(["What is 5!?", "f'(2)", "3 - 4"], ["What is 5?", "f(2)", "3 + 4"]) == (0, 0, 0), (
        "signs may be the question"
    )


def test_near_copies_are_found_and_other_questions_are_not():
    story = STORY.format(n=48)
    assert found([story.replace("friends in April", "friends in the month of April")], [story]) == (0, 0, 1)
    assert found([STORY.format(n=51)], [story]) == (0, 0, 1), "one number changed in a long text"
    assert found(["Tom sold 48 clips in April and half as many in May. How many did he sell in all?"], [story]) == (
        0,
        0,
        0,
    )
    assert found(["3 + 4 - 2"], ["3 + 4 - 1"]) == (0, 0, 0), "too short to be told from another question"


def test_system_prompts_make_nothing_alike():
    def chat(text: str) -> tuple[dict[str, str], ...]:
        return ({"role": "system", "content": STORY}, {"role": "user", "content": text})

    assert found(
        [chat("a few words of one kind only here now")], [chat("other words, of which none is the same as there")]
    ) == (0, 0, 0)
    assert found([chat("One?")], [({"role": "user", "content": "one"},)]) == (0, 1, 0)


def test_near_copies_among_many_agree_with_comparing_all_pairs():
    rng = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    held = [" ".join(rng.choices(words, k=30)) for _ in range(200)]
    train = []
    for text in held[:60]:
        parts = text.split()
        for at in rng.sample(range(30), rng.randint(1, 6)):
            parts[at] = rng.choice(words)
        train.append(" ".join(parts))
    train += [" ".join(rng.choices(words, k=30)) for _ in range(100)]

    def grams(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        return {tuple(parts[i : i + 3]) for i in range(len(parts) - 2)}

    brute = sum(any(len(grams(t) & grams(h)) / len(grams(t) | grams(h)) >= 0.7 for h in held) for t in train)
    assert found(train, held)[2] == brute and 10 < brute < 50


@pytest.mark.parametrize(
    ("policy", "left", "said"),
    [
        ("remove", 9, "2 training rows are held out too"),
        ("remove_near", 8, "3 training"),
        ("keep", 10, "1 training rows are held out too, and"),
    ],
)
def test_policies(tokenizer: Any, write_jsonl: Write, policy: str, left: int, said: str):
    story = STORY.format(n=48)
    own = [{"prompt": f"{i} + 1", "answer": 1} for i in range(8)]
    leaked = [{"prompt": text, "answer": 1} for text in ("the  same", "THE same.", story + " Say.", "0 + 1")]
    held = [{"prompt": text, "answer": 1} for text in ("The same?", story, "the  same")]
    path, apart = write_jsonl(own + leaked), write_jsonl(held, "held.jsonl")
    task: Task = load_task(
        TaskConfig.model_validate({"kind": "jsonl", "path": path, "eval_path": apart, "leakage": policy}),
        tokenizer,
        1000,
        10,
    )
    assert (len(task.train), len(task.held_out)) == (left, 3)
    assert any(note.startswith(said) for note in task.notes), task.notes
    assert "1 rows repeat an earlier row's prompt and were left out" in task.notes
    assert not {p.text for p in task.train} & {p.text for p in task.held_out}
    assert any("remove_near" in note for note in task.notes) == (policy != "remove_near")
