from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from respec.config import Config
from respec.errors import RunDirError
from respec.report.records import METRICS_FILE
from respec.report.run_dir import RunDir
from respec.report.tail import Tail

Make = Callable[..., Config]


def steps(tail: Tail) -> tuple[bool, list[int]]:
    anew, records = tail.read()
    return anew, [record.step for record in records]


def test_each_step_is_given_once_however_the_reads_fall(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        tail, seen = Tail(run.path), []
        for step in range(7):
            run.write_step(step, {"reward/mean": step / 7})
            if step % 3 == 1:
                anew, records = tail.read()
                assert not anew
                seen += [(record.step, record.metrics["reward/mean"]) for record in records]
        seen += [(record.step, record.metrics["reward/mean"]) for record in tail.read()[1]]
        assert seen == [(record.step, record.metrics["reward/mean"]) for record in run.read_metrics()]
        assert tail.read() == (False, [])


def test_a_half_written_line_is_left_for_the_next_time(tmp_path: Path) -> None:
    file, tail = tmp_path / METRICS_FILE, Tail(tmp_path)
    assert steps(tail) == (False, [])
    file.write_text('{"step": 1, "time": 0}\n{"step": 2, "ti')
    assert steps(tail) == (False, [1])
    with file.open("a") as more:
        more.write('me": 0}\n')
    assert steps(tail) == (False, [2])


def test_a_run_put_back_is_read_anew(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        tail = Tail(run.path)
        for step in (1, 2, 3):
            run.write_step(step, {"reward/mean": 0.0})
        assert steps(tail) == (False, [1, 2, 3])
        run.cut_back(1)
        for step in (2, 3, 4):
            run.write_step(step, {"reward/mean": 1.0})
        assert steps(tail) == (True, [1, 2, 3, 4])


def test_a_damaged_line_is_named_and_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "time": 0}\nnonsense\n{"step": 3, "time": 0}\n')
    tail = Tail(tmp_path)
    for _ in range(2):
        with pytest.raises(RunDirError, match=r"byte 23 is damaged"):
            tail.read()
