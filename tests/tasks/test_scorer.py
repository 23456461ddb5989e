from __future__ import annotations

import pickle
import random
import re
from pathlib import Path

import pytest

from respec.config import TaskConfig
from respec.errors import ConfigError, TaskError
from respec.tasks.scorer import Scorer
from respec.tasks.task import load_task
from respec.tasks.worked import chain_sum


@pytest.mark.parametrize(
    ("pattern", "completion", "answer"),
    [
        ("", "  12 \n", "12"),
        (r"Answer: (\S+)", "Answer: 1\nno, Answer: 2", "2"),
        (r"Answer: (\S+)", "twelve", None),
        (r"Answer:( \d+)?", "Answer:", None),
    ],
)
def test_extraction_takes_the_last_match(pattern: str, completion: str, answer: str | None):
    assert Scorer("answer", pattern).extract(completion) == answer


def test_exact_match():
    scorer = Scorer("answer", r"Answer: (.+)")
    assert scorer.task({"answer": 14}, "so\nAnswer: 14 ") == 1.0
    assert scorer.task({"answer": 14}, "so\nAnswer: 15") == 0.0
    assert scorer.task({"answer": 14}, "14") == 0.0, "no match of the pattern"


@pytest.mark.parametrize(
    ("truth", "completion", "score"),
    [
        ("1/2", "It is 0.5", 1.0),
        ("1/2", "The answer is $\\frac{2}{4}$", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("1/2", "It is 0.6", 0.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("14", "I don't know", 0.0),
        ("1,000", "It is 1000", 1.0),
        ("-3.50", "It is -3.5", 1.0),
        ("x + 1", "It is 1", 0.0),
        ("no idea", "no idea ", 1.0),
        ("", "", 1.0),
    ],
)
def test_math_compares_values(truth: str, completion: str, score: float):
    assert Scorer("answer").math({"answer": truth}, completion) == score


def test_math_of_a_cut_out_answer():
    scorer = Scorer("answer", r"Answer: (.+)")
    assert scorer.math({"answer": "0.5"}, "9 steps\nAnswer: \\frac{1}{2}") == 1.0
    assert scorer.math({"answer": "9"}, "9 steps\nAnswer: \\frac{1}{2}") == 0.0
    assert scorer.math({"answer": "9"}, "9") == 0.0


def test_a_dataset_scorer_that_raises_on_an_unreadable_answer_means_wrong():
    scorer = Scorer("answer", dataset="prime_factorization")
    entry = {"question": "?", "answer": "2 × 3", "metadata": {"number": 6, "factors": [2, 3]}}
    assert scorer.task(entry, "2 × 3") == 1.0
    assert scorer.task(entry, "garbage") == 0.0
    with pytest.raises(AttributeError):
        scorer.task({**entry, "answer": 6}, "garbage")  # no answer can be right here: the row is at fault


def test_a_scorer_travels_without_its_dataset():
    scorer = Scorer("answer", dataset="chain_sum")
    entry = {"question": "?", "answer": "6", "metadata": {}}
    assert scorer.task(entry, "6") == 1.0
    copy = pickle.loads(pickle.dumps(scorer))
    assert copy == scorer and "_dataset" not in vars(copy)
    assert copy.task(entry, "6") == 1.0


def test_chain_sum_is_worked_from_left_to_right():
    assert chain_sum({"metadata": {"expression": "-3 - -4"}}) == "-3 - -4 = 1\n<answer>1</answer>"
    assert chain_sum({"metadata": {"expression": "7"}}) == "<answer>7</answer>"


def test_every_line_of_a_worked_chain_is_true_and_leads_to_the_next():
    sizes = set()
    for seed in range(300):
        terms = random.Random(seed).choices(range(10), k=2 + seed % 7)
        signs = random.Random(-seed).choices("+-", k=len(terms) - 1)
        rest = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
        whole = eval(rest)
        solution = chain_sum({"metadata": {"expression": rest}})
        assert solution == chain_sum({"metadata": {"expression": rest}}), "a row has one solution"
        *lines, last = solution.split("\n")
        for line in lines:
            match = re.fullmatch(r"(.+) = (-?\d+)(?:, (?:so|then|giving|leaving) (.+))?", line)
            assert match
            worked, value, left = match.groups()
            assert eval(worked) == int(value)
            assert rest == worked + (left or value).removeprefix(value)
            assert left is None or left.startswith(f"{value} ")
            sizes.add(worked.count(" ") // 2)
            rest = left or value
        assert rest == str(whole) and last == f"<answer>{whole}</answer>"
    assert sizes == {1, 2, 3}


def test_worked_chain_sums_score_full_marks(tokenizer):
    config = TaskConfig(
        dataset="chain_sum",
        params={"allow_negation": True},
        train_size=2,
        eval_size=2,
        answer_pattern=r"<answer>(.+)</answer>",
        solution="respec.tasks.worked:chain_sum",
    )
    task = load_task(config, tokenizer, 1000, 16)
    assert all(task.score(prompt, str(solution)) == 1.0 for prompt, solution in task.worked(50))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer_pattern": "Answer: ("}, r"answer_pattern .* is not a regular expression"),
        ({"answer_pattern": "Answer: .+"}, r"answer_pattern .* has no group"),
        ({"solution": "nonsense"}, r"task.solution = 'nonsense' is not of the form"),
        ({"solution": "respec.tasks.worked:chainsum"}, r"has no 'chainsum'; did you mean 'chain_sum'"),
    ],
)
def test_configuration_errors_come_before_any_row_is_made(tokenizer, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_task(TaskConfig(dataset="no such dataset", **settings), tokenizer, 1000, 16)


def test_no_worked_solution_says_what_to_set(tokenizer):
    task = load_task(TaskConfig(dataset="lcm", train_size=2, eval_size=0), tokenizer, 1000, 16)
    with pytest.raises(TaskError, match=r"'lcm' comes without worked solutions; set task.solution"):
        task.worked(1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"task.solution 'solves:solve' raised ZeroDivisionError"),
        ("return None", r"'solves:solve' gave a NoneType"),
        ("return ''", r"'solves:solve' gave an empty text"),
    ],
)
def test_a_solution_function_that_fails(tokenizer, here: Path, write_jsonl, body: str, message: str):
    (here / "solves.py").write_text(f"def solve(row):\n    {body}\n")
    path = write_jsonl([{"prompt": "a", "answer": "b"}])
    config = TaskConfig(kind="jsonl", path=path, eval_size=0, solution="solves:solve")
    with pytest.raises(TaskError, match=message + ".*line 1 of 'data.jsonl', prompt 'a'"):
        load_task(config, tokenizer, 1000, 16).worked(1)


def test_a_solution_function_sees_question_answer_and_metadata(tokenizer, here: Path):
    (here / "tells.py").write_text("def tell(row):\n    return ' '.join(sorted(row))\n")
    config = TaskConfig(dataset="lcm", train_size=2, eval_size=0, solution="tells:tell")
    assert load_task(config, tokenizer, 1000, 16).worked(1)[0][1] == "answer metadata question"
