from __future__ import annotations

from pathlib import Path

import pytest

from respec.errors import NonFiniteError
from respec.report.live import PlainView
from respec.report.said import SAID_FILE, TAIL_BYTES, keeping, read_said


def view(lines: list[str]) -> PlainView:
    return PlainView("run", 3, lines.append)


def test_what_is_said_is_shown_and_kept(tmp_path: Path) -> None:
    shown: list[str] = []
    for word in ("first", "second"):
        with keeping(tmp_path, view(shown)) as kept:
            kept.say(f"the {word}")
    assert [(entry["kind"], entry["line"]) for entry in read_said(tmp_path)] == [
        ("started", ""),
        ("said", "the first"),
        ("started", ""),
        ("said", "the second"),
    ]
    assert sum("the first" in line for line in shown) == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NonFiniteError("the loss is NaN"), "the loss is NaN"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_the_error_that_ends_a_run_is_kept_and_raised(tmp_path: Path, error: Exception, line: str) -> None:
    with pytest.raises(type(error)), keeping(tmp_path, view([])):
        raise error
    last = read_said(tmp_path)[-1]
    assert (last["kind"], last["line"]) == ("failed", line)


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), keeping(tmp_path, view([])):
        raise KeyboardInterrupt
    assert [entry["kind"] for entry in read_said(tmp_path)] == ["started"]


def test_of_a_long_log_the_end_is_read_and_damage_is_left_out(tmp_path: Path) -> None:
    with keeping(tmp_path, view([])) as kept:
        for number in range(3000):
            kept.say(f"line {number} " + "x" * 40)
    with (tmp_path / SAID_FILE).open("a") as file:
        file.write('{"time": 1}\nnonsense\n[]\n')
    entries = read_said(tmp_path)
    assert 0 < len(entries) < TAIL_BYTES / 40 and entries[-1]["line"].startswith("line 2999 ")
    assert read_said(tmp_path / "elsewhere") == []
