from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from respec.config import parse_config
from respec.errors import RunDirError
from respec.report import lock
from respec.report.dash.followed import COMPARED_POINTS, POINTS, Followed
from respec.report.live import PlainView
from respec.report.page_data import thinned
from respec.report.records import METRICS_FILE, StepMetrics, metrics_line
from respec.report.run_dir import RunDir
from respec.report.said import keeping

Run = Callable[..., Path]


def state(path: Path) -> tuple[str, str]:
    row = Followed("run", path).row()
    return row["state"], row["detail"]


def test_the_state_of_a_run_is_what_became_of_it(make_run: Run, tmp_path: Path) -> None:
    assert state(make_run("done", 6, 6))[0] == "finished"
    stopped = make_run("stopped", 3, 6)
    assert state(stopped)[0] == "stopped"
    lock.acquire(stopped)
    assert state(stopped)[0] == "running"
    owner = json.loads((stopped / "lock").read_text())
    (stopped / "lock").write_text(json.dumps(owner | {"started": 1.0}))
    assert state(stopped) == ("failed", "its process ended without closing the folder")
    (stopped / "lock").write_text(json.dumps(owner | {"host": "another"}))
    assert state(stopped) == ("running", "on another")


def test_an_error_that_ended_a_run_is_told_until_it_is_started_again(make_run: Run) -> None:
    path, view = make_run("failed", 3, 6), PlainView("run", 6, lambda line: None)
    with pytest.raises(RunDirError), keeping(path, view):
        raise RunDirError("the disk is full")
    assert state(path) == ("failed", "the disk is full")
    with keeping(path, view):
        pass
    assert state(path)[0] == "stopped"


def test_the_row_follows_the_run(make_run: Run) -> None:
    path = make_run("run", 3, 9, **{"rollout/speedup": 1.5, "rollout/tokens_identical": 0.0})
    followed = Followed("run", path)
    row = followed.row()
    assert (row["step"], row["steps"], row["reward"], row["speedup"], row["accuracy"], row["alarms"]) == (
        3,
        9,
        0.3,
        1.5,
        0.25,
        1,
    )
    with RunDir(
        parse_config(
            {
                "run": {"dir": str(path), "steps": 9},
                "model": {"path": "builtin:demo"},
                "task": {"dataset": "chain_sum"},
                "tracking": {"to": []},
            }
        )
    ) as run:
        run.write_step(4, {"reward/mean": 0.9, "eval/accuracy": 0.5, "rollout/speedup": 2.5})
        row = followed.row()
        assert (row["step"], row["reward"], row["accuracy"], row["accuracy_first"], row["state"]) == (
            4,
            0.9,
            0.5,
            0.25,
            "running",
        )
        assert followed.report()["series"]["reward/mean"]["value"][-1] == 0.9
        run.cut_back(1)
        assert followed.row()["step"] == 1 and followed.row()["accuracy"] == 0.25
        assert followed.report()["series"]["reward/mean"]["value"] == [0.1]


def test_only_what_was_added_is_read(make_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run("long", 50, 99)
    followed = Followed("long", path)
    followed.report()
    read: list[bytes] = []
    monkeypatch.setattr(
        "respec.report.tail.parse_metrics", lambda line: read.append(line) or StepMetrics(51, 0.0, {"reward/mean": 1.0})
    )
    with (path / METRICS_FILE).open("a") as file:
        file.write(metrics_line(StepMetrics(51, 0.0, {"reward/mean": 1.0})))
    assert followed.report()["last_step"] == 51 and len(read) == 1


def test_answers_are_bounded_and_keep_a_lines_peaks(make_run: Run) -> None:
    path = make_run("long", 1, 99)
    with (path / METRICS_FILE).open("a") as file:
        for step in range(2, 9000):
            file.write(
                metrics_line(
                    StepMetrics(
                        step, 0.0, {"reward/mean": math.sin(step / 500) + 9 * (step == 4321), "time/step_s": 1.0}
                    )
                )
            )
    followed = Followed("long", path)
    report, compared = followed.report(), followed.lines(["reward/mean"])["lines"]["reward/mean"]
    for line, most in ((report["series"]["reward/mean"], POINTS), (compared, COMPARED_POINTS)):
        assert len(line["step"]) <= most and 4321 in line["step"] and line["step"][-1] == 8999
    assert len(report["split"]) <= POINTS


def test_hours_leave_out_what_was_measured_beside_training(make_run: Run) -> None:
    path = make_run("run", 2, 6, **{"time/eval_s": 1800.0, "time/compare_s": 900.0})
    assert Followed("run", path).lines(["reward/mean"])["lines"]["reward/mean"]["hours"] == [0.25, 0.5]


def test_thinning_keeps_short_lines_whole() -> None:
    assert thinned([3.0, 1.0, 2.0], 3) == [0, 1, 2]
    kept = thinned([float(i % 7) for i in range(1000)], 20)
    assert len(kept) <= 20 and kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == 999
