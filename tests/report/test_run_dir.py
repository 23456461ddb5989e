from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from respec.config import Config
from respec.errors import RunDirError
from respec.report import records
from respec.report.run_dir import RunDir
from respec.types import RoundRecord, ScoredRollout

Make = Callable[..., Config]
Scored = Callable[..., ScoredRollout]


def test_a_step_comes_back_as_it_was_written(
    make_config: Make, make_scored: Scored, make_rounds: Callable[[int], tuple[RoundRecord, ...]]
) -> None:
    scored = [make_scored(row, sample, 3 + sample) for row in (4, 9) for sample in range(2)]
    with RunDir(make_config()) as run:
        run.write_step(1, {"reward/mean": 0.1 + 0.2, "policy/loss": math.nan}, scored, make_rounds(10), [["a", "<b>"]])
        read = run.read_rollouts(1)
        metrics = run.read_metrics()[0].metrics
    assert metrics["reward/mean"] == 0.1 + 0.2 and math.isnan(metrics["policy/loss"])
    assert records.read_rounds(run.path, 1) == make_rounds(10)
    assert [kept.pieces for kept in records.read_kept(run.path, 1)] == [("a", "<b>"), (), (), ()]
    for before, after in zip(scored, read, strict=True):
        assert after.rollout.key == before.rollout.key
        assert after.rollout.prompt.token_ids == before.rollout.prompt.token_ids
        assert (after.reward, after.part, after.rollout.finish) == (before.reward, before.part, before.rollout.finish)
        for name in ("token_T", "proposer_T", "round_T", "version_T"):
            one, other = getattr(before.rollout, name), getattr(after.rollout, name)
            assert one.dtype == other.dtype and np.array_equal(one, other), name
        assert np.abs(after.rollout.logprob_T - before.rollout.logprob_T).max() < 1e-5


def test_rollouts_are_thinned_as_configured(make_config: Make, make_scored: Scored) -> None:
    scored = [make_scored(1, sample) for sample in range(5)]
    with RunDir(make_config(report={"rollouts_per_step": 2, "rollout_every": 3})) as run:
        for step in range(1, 7):
            run.write_step(step, {}, scored)
        assert run.rollout_steps() == (3, 6)
        assert len(run.read_rollouts(6)) == 2 and run.read_rollouts(5) == ()


def test_cutting_back_leaves_no_step_twice(make_config: Make, make_scored: Scored) -> None:
    config = make_config(tracking={"to": ["tensorboard"]})
    with RunDir(config) as run:
        for step in range(1, 6):
            run.write_step(step, {"reward/mean": step / 10}, [make_scored(step, 0)])
        run.write_summary({"wall_s": 1})
    with RunDir(config) as run:
        assert run.resumed and run.last_step == 5
        run.cut_back(2)
    assert _events(run.path) == {1: 0.1, 2: 0.2}
    with RunDir(config) as run:
        assert run.rollout_steps() == (1, 2) and not (run.path / "summary.json").exists()
        for step in range(3, 5):
            run.write_step(step, {"reward/mean": 1.0 + step}, [make_scored(step, 0)])
    assert [record.step for record in records.read_metrics(run.path)] == [1, 2, 3, 4]
    assert _events(run.path) == {1: 0.1, 2: 0.2, 3: 4.0, 4: 5.0}


def test_cutting_back_to_before_the_start_empties_the_run(make_config: Make, make_scored: Scored) -> None:
    with RunDir(make_config()) as run:
        run.write_step(0, {"eval/accuracy": 0.5})
        run.write_step(1, {"reward/mean": 0.5}, [make_scored(0, 0)])
        run.cut_back(-1)
        assert run.read_metrics() == () and run.rollout_steps() == () and run.last_step is None
        run.write_step(0, {"eval/accuracy": 0.25})


def test_a_lengthened_run_has_no_summary_until_it_ends_again(make_config: Make) -> None:
    with RunDir(make_config(run={"steps": 1})) as run:
        run.write_step(1, {})
        run.write_summary({"steps": 1})
    with RunDir(make_config(run={"steps": 2})) as run:
        run.cut_back(1)
        assert (run.path / "summary.json").exists()
        run.write_step(2, {})
        assert not (run.path / "summary.json").exists()


def test_a_step_cannot_be_written_twice(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        run.write_step(1, {})
        with pytest.raises(ValueError, match="step 1"):
            run.write_step(1, {})


def test_a_torn_last_line_is_cut_and_said(make_config: Make) -> None:
    config = make_config()
    with RunDir(config) as run:
        run.write_step(1, {"reward/mean": 0.25})
        run.write_step(2, {"reward/mean": 0.5})
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1])):
        path.write_bytes(whole[:-cut])
        assert [record.step for record in records.read_metrics(run.path)] == [1]
    with RunDir(config) as run:
        assert any("half-written" in note for note in run.notes) and run.last_step == 1
        run.write_step(2, {"reward/mean": 0.75})
    assert [record.metrics["reward/mean"] for record in records.read_metrics(run.path)] == [0.25, 0.75]


def test_damage_amid_the_metrics_is_an_error_that_names_the_line(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        for step in range(3):
            run.write_step(step, {})
    path = run.path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"stop": 1'))
    with pytest.raises(RunDirError, match="line 2"):
        RunDir(make_config())
    assert not (run.path / "lock").exists()


def test_killed_while_writing_it_can_be_opened_again(make_config: Make, tmp_path: Path) -> None:
    program = (
        "import sys, tomllib, os\nfrom respec.config import parse_config\nfrom respec.report.run_dir import RunDir\n"
        "run = RunDir(parse_config(tomllib.loads(sys.stdin.read())))\n"
        "print('open', flush=True)\n"
        "for step in range(1, 10**6): run.write_step(step, {'reward/mean': step})\n"
    )
    import tomli_w

    from respec.report.run_dir import tree_of

    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(tomli_w.dumps(tree_of(make_config())).encode())
    child.stdin.close()
    assert child.stdout.readline() == b"open\n"
    with pytest.raises(RunDirError, match=f"in use by process {child.pid}"):
        RunDir(make_config())
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    with RunDir(make_config()) as run:
        assert run.resumed and any(f"process {child.pid}" in note for note in run.notes)
        steps = [record.step for record in run.read_metrics()]
        assert steps == list(range(1, len(steps) + 1)) and steps


def test_a_folder_cannot_be_opened_twice(make_config: Make) -> None:
    with RunDir(make_config()), pytest.raises(RunDirError, match=str(os.getpid())):
        RunDir(make_config())
    RunDir(make_config()).close()


@pytest.mark.parametrize("content", ["", "{", json.dumps({"pid": 1}), json.dumps([1])])
def test_a_lock_that_names_nobody_alive_is_taken_over(make_config: Make, content: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    if content == json.dumps({"pid": 1}):  # process 1 lives, but it is not the one that wrote this
        content = json.dumps({"pid": 1, "host": socket.gethostname(), "started": psutil.Process(1).create_time() - 99})
    (tmp_path / "run" / "lock").write_text(content)
    RunDir(make_config()).close()


def test_a_lock_of_another_machine_is_respected(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(json.dumps({"pid": 2, "host": "elsewhere", "since": "noon"}))
    with pytest.raises(RunDirError, match="elsewhere"):
        RunDir(make_config())


def test_another_configuration_is_refused_by_key_and_values(make_config: Make) -> None:
    with RunDir(make_config(policy={"lr": 1e-5})) as run:
        run.write_step(1, {"reward/mean": 0.5})
    with pytest.raises(RunDirError) as raised:
        RunDir(make_config(policy={"lr": 2e-5}, run={"threads": 1}, task={"reward": [{"fn": "math"}]}))
    message = str(raised.value)
    for part in ("policy.lr: was 1e-05, now 2e-05", "run.threads: was 2, now 1", "task.reward.0.fn: was 'task'"):
        assert part in message
    RunDir(make_config(policy={"lr": 1e-5})).close()


def test_length_measuring_and_saving_may_change(make_config: Make) -> None:
    RunDir(make_config()).close()
    changed = make_config(
        run={"steps": 7, "compare_plain_every": 2},
        eval={"every": 3},
        checkpoint={"keep": 5},
        report={"rollout_every": 2},
    )
    with RunDir(changed) as run:
        assert run.config == changed
    with RunDir(changed) as run:
        assert len(json.loads((run.path / "provenance.json").read_text())["starts"]) == 3


def test_threads_are_resolved_once_for_a_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("respec.report.run_dir.usable_cores", lambda: 3)
    with RunDir(make_config(run={"threads": 0})) as run:
        assert run.config.run.threads == 3
        run.write_step(1, {"reward/mean": 0.5})
    monkeypatch.setattr("respec.report.run_dir.usable_cores", lambda: 64)
    with RunDir(make_config(run={"threads": 0})) as run:
        assert run.config.run.threads == 3
    with pytest.raises(RunDirError, match="threads"):
        RunDir(make_config(run={"threads": 64}))


def test_a_folder_of_something_else_is_left_alone(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(RunDirError, match=r"thesis\.tex"):
        RunDir(make_config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_named(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="cannot be used as a run folder"):
        RunDir(make_config())


def test_an_unreadable_recorded_configuration_is_named(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        pass
    (run.path / "config.toml").write_text("[model]\nname = 3")
    with pytest.raises(RunDirError, match=r"config\.toml"):
        RunDir(make_config())


def test_changed_versions_are_said(make_config: Make) -> None:
    with RunDir(make_config()) as run:
        path = run.path / "provenance.json"
    tree = json.loads(path.read_text())
    tree["starts"][0]["versions"]["torch"] = "0.4.1"
    path.write_text(json.dumps(tree))
    with RunDir(make_config()) as run:
        assert any("torch 0.4.1 -> " in note for note in run.notes)


def test_without_tensorboard_the_run_goes_on(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with RunDir(make_config(tracking={"to": ["tensorboard"]})) as run:
        assert sum("tensorboard is not installed" in note for note in run.notes) == 1
        run.write_step(1, {"reward/mean": 1.0})
        run.write_step(2, {"reward/mean": 1.0})
        assert len(run.read_metrics()) == 2


def _events(run_dir: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "events"))
    accumulator.Reload()
    scalars = accumulator.Scalars("reward/mean")
    assert len({event.step for event in scalars}) == len(scalars)
    return {event.step: round(event.value, 5) for event in scalars}


def test_a_run_that_did_no_step_does_not_hold_its_configuration_against_the_mended_one(make_config: Make) -> None:
    first = make_config(policy={"lr": 1e-3})
    with RunDir(first) as run:
        run.write_step(0, {"eval/accuracy": 0.5})
        (run.path / "checkpoints" / "000000").mkdir()
    with RunDir(make_config(policy={"lr": 2e-3})) as run:
        assert (
            run.last_step is None and run.config.policy.lr == 2e-3 and any("begins anew" in note for note in run.notes)
        )
        assert not list((run.path / "checkpoints").iterdir())
        run.write_step(0, {"eval/accuracy": 0.5})
        run.write_step(1, {"reward/mean": 0.5})
    with pytest.raises(RunDirError, match="--fresh"):
        RunDir(first)
