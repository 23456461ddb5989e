"""Final answers in worked solutions."""

from __future__ import annotations

import pytest

from respec.tasks.answers import boxed, hashes, unmatched
from respec.tasks.scorer import Scorer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = <<48/2=24>>24\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### -3.5", "-3.5"),
        ("#### 1\n#### 2\nand so on", "2"),
        ("#### (1, 2)", "(1, 2)"),
        ("no answer", None),
        ("####", None),
    ],
)
def test_behind_the_hashes(text: str, answer: str | None):
    assert hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so $\\boxed{7}$.", "7"),
        ("\\boxed{1} or \\boxed{\\frac{\\sqrt{3}}{2}}$", "\\frac{\\sqrt{3}}{2}"),
        ("\\fbox{\\text{(A)}}", "\\text{(A)}"),
        ("thus \\boxed 9$.", "9"),
        ("\\boxed {x^{2}}", "x^{2}"),
        ("\\boxed{never closed", None),
        ("42", None),
    ],
)
def test_in_the_box(text: str, answer: str | None):
    assert boxed(text) == answer


def test_a_pattern_that_no_completion_has_is_said():
    scorer = Scorer("answer", "<a>(.*)</a>")
    (line,) = unmatched(scorer, ["one", "two"])
    assert "'<a>(.*)</a>' is in none of this step's 2 completions" in line and "ends with 'one'" in line
    assert (
        not unmatched(scorer, ["one", "<a>1</a>"])
        and not unmatched(Scorer("answer"), ["one"])
        and not unmatched(scorer, [])
    )
