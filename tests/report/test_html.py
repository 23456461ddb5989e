from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from respec.config import Config
from respec.errors import RunDirError
from respec.report.html import write_report
from respec.report.page_data import collect, evenly
from respec.report.run_dir import RunDir
from respec.types import RoundRecord, ScoredRollout

Make = Callable[..., Config]
Scored = Callable[..., ScoredRollout]
EVIL = "</script><script>alert(1)</script><!-- & <b>"


def data_of(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match.group(1))


@pytest.fixture
def run(make_config: Make, make_scored: Scored, make_rounds: Callable[[int], tuple[RoundRecord, ...]]) -> Path:
    with RunDir(make_config(run={"steps": 12})) as run:
        run.write_step(0, {"eval/accuracy": 0.25, "eval/se": 0.02})
        for step in range(1, 13):
            scored = [make_scored(row, sample, 5 + step, EVIL) for row in (1, 2) for sample in range(4)]
            metrics = {"reward/mean": step / 12, "time/generation_s": 3.0, "time/training_s": 1.0, "time/step_s": 5.0}
            metrics |= {"policy/grad_norm": math.nan, "rollout/speedup": 1.5} if step == 3 else {}
            run.write_step(step, metrics, scored, make_rounds(6), [[EVIL, "\n", "", "x", "y"] + ["z"] * step])
    return run.path


def test_the_page_holds_everything_and_asks_the_network_for_nothing(run: Path) -> None:
    page = write_report(run).read_text()
    assert "Plotly" in page and "default-src 'none'" in page
    without_plotly = re.sub(r"<script>/\*.*?</script>", "", page, flags=re.DOTALL)
    assert len(without_plotly) < 1_000_000
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", without_plotly)
    assert "{{" not in without_plotly.replace("{{}}", "")


def test_text_from_the_run_cannot_become_markup(run: Path) -> None:
    page = write_report(run).read_text()
    assert EVIL not in page and "<script>alert" not in page
    embedded = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(embedded)
    shown = data_of(page)["rollouts"][0]["shown"][0]
    assert shown["text"] == EVIL and shown["pieces"][0] == EVIL


def test_figures_of_a_run_under_way_come_from_its_steps(run: Path) -> None:
    data = collect(run)
    assert not data["finished"] and data["last_step"] == 12
    assert data["headline"] == {
        "reward_first": 1 / 12,
        "reward_last": 1.0,
        "accuracy_before_rl": 0.25,
        "accuracy_se": 0.02,
        "rollout_speedup": 1.5,
        "wall_s": 60.0,
        "time_split": {"generation_s": 36.0, "reward_s": 0.0, "training_s": 12.0, "other_s": 12.0},
    }
    assert data["series"]["reward/mean"]["step"] == list(range(1, 13)) and "policy/grad_norm" not in data["series"]
    assert [end["label"] for end in data["histogram"]] == ["first: steps 1–3", "last: steps 10–12"]
    assert data["lengths"][0]["median"] == 6 and data["lengths"][-1]["max"] == 17


def test_the_summary_wins_once_it_is_there(run: Path) -> None:
    (run / "summary.json").write_text(
        json.dumps({"accuracy_before_rl": 0.3, "accuracy_after_rl": 0.5, "reward_last": None})
    )
    data = collect(run)
    assert data["finished"]
    assert [data["headline"][name] for name in ("accuracy_before_rl", "accuracy_after_rl", "reward_last")] == [
        0.3,
        0.5,
        1.0,
    ]


def test_the_rounds_tell_time_plan_and_batch(run: Path) -> None:
    rounds = collect(run)["rounds"][0]
    assert rounds["plan"] == ["suffix s=6"] * 3 + ["plain"] * 3
    assert rounds["active"] == [6, 5, 4, 3, 2, 1]
    assert rounds["start"][:2] == [0.0, 0.003] and rounds["end"] == pytest.approx(6 * 0.003 + 0.15)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_report_too(make_config: Make, make_scored: Scored, steps: int) -> None:
    with RunDir(make_config()) as run:
        for step in range(1, steps + 1):
            run.write_step(step, {"reward/mean": 0.5}, [make_scored(1, 0)])
    data = data_of(write_report(run.path).read_text())
    assert data["last_step"] == steps and not data["finished"] and data["histogram"] == []


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no run"):
        write_report(tmp_path)


def test_evenly_keeps_both_ends() -> None:
    assert evenly(range(1, 101), 5) == [1, 26, 51, 75, 100]
    assert evenly([3, 4], 5) == [3, 4] and evenly([], 5) == []


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a Chromium to open the page in")
def test_a_browser_draws_it_without_a_complaint(run: Path, tmp_path: Path) -> None:
    page = write_report(run)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    done = subprocess.run(
        ["chromium", *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    drawn = done.stdout
    assert drawn.count("main-svg") >= 10 and drawn.count('class="rollout"') == 1
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in drawn
    assert "not finished when this was written: 12 of 12 steps" in drawn
