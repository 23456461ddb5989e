"""Trackers. The failures of a network are played by a tracker of the test's own, since no server can be had here; what is kept is read back from
the real ones where they are installed: wandb offline, MLflow's file store, trackio on this machine."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from respec.config import Config
from respec.errors import ConfigError
from respec.report import tracking
from respec.report.run_dir import RunDir
from respec.report.trackers import OPEN, Start, Tracker
from respec.report.tracking import refuse_missing, tracked

Make = Callable[..., Config]


class Server:
    """A tracker in memory: what it was handed, and when it fails or hangs."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.closed: list[bool] = []
        self.fails_at: int | None = None
        self.hangs: threading.Event | None = None

    def open(self, start: Start) -> Tracker:
        self.starts.append(start)

        def log(step: int, time: float, metrics: Mapping[str, float]) -> None:
            if self.hangs is not None:
                self.hangs.wait(30)
            if step == self.fails_at:
                raise ConnectionError("the network\nis gone " + "x" * 1000)
            self.steps.append((step, dict(metrics)))

        return Tracker(start.id or f"id {len(self.starts)}", "there", log, self.closed.append)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setitem(OPEN, "wandb", server.open)
    monkeypatch.setattr(tracking, "POLL_S", 0.01)
    return server


def run_steps(config: Config, steps: range, said: list[str], cut: int | None = None) -> None:
    with RunDir(config) as run, tracked(run.path, run.config, said.append):
        if cut is not None:
            run.cut_back(cut)
        for step in steps:
            run.write_step(step, {"reward/mean": step / 8, "policy/loss": float("nan")})


def test_a_tracker_is_handed_each_step_once_and_the_same_names(make_config: Make, server: Server) -> None:
    said: list[str] = []
    run_steps(make_config(tracking={"to": ["wandb"], "name": "mine"}), range(4), said)
    assert server.steps == [(step, {"reward/mean": step / 8}) for step in range(4)]  # what is not finite is left out
    assert server.closed == [False] and said == ["wandb: there"]
    assert server.starts[0].name == "mine" and server.starts[0].settings["model.path"] == "builtin:demo"


def test_a_run_gone_on_with_is_the_same_run_there_and_nothing_is_told_twice(make_config: Make, server: Server) -> None:
    config = make_config(tracking={"to": ["wandb"]})
    run_steps(config, range(6), [])
    run_steps(config, range(4, 8), [], cut=3)  # killed after step 5, its last checkpoint of step 3
    assert [start.id for start in server.starts] == ["", "id 1"]
    assert [step for step, _ in server.steps] == list(range(8))


def test_a_tracker_added_later_gets_what_it_missed(make_config: Make, server: Server) -> None:
    run_steps(make_config(), range(3), [])
    run_steps(make_config(tracking={"to": ["wandb"]}), range(3, 5), [])
    assert [step for step, _ in server.steps] == list(range(5))


def test_a_tracker_that_fails_says_so_once_and_the_run_goes_on(make_config: Make, server: Server) -> None:
    config, said = make_config(tracking={"to": ["wandb"]}), []
    server.fails_at = 1
    run_steps(config, range(5), said)
    (line,) = [line for line in said if "failed" in line]
    assert "wandb failed (ConnectionError: the network is gone" in line and len(line) < 500
    with RunDir(config) as run:
        assert run.last_step == 4
    server.fails_at, server.steps = None, []
    run_steps(config, range(5, 6), said)
    assert server.steps[-1][0] == 5 and 1 in [step for step, _ in server.steps]


def test_one_that_cannot_be_opened_fails_alike(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(start: Start) -> Tracker:
        raise SystemExit("no key")

    monkeypatch.setitem(OPEN, "mlflow", refuses)
    said: list[str] = []
    run_steps(make_config(tracking={"to": ["mlflow"]}), range(2), said)
    assert said == ["mlflow failed (SystemExit: no key); the run goes on without it"]


def test_one_that_hangs_holds_up_neither_the_steps_nor_the_end(
    make_config: Make, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSING_S", 0.2)
    server.hangs = threading.Event()
    said: list[str] = []
    run_steps(make_config(tracking={"to": ["wandb"]}), range(3), said)
    assert not server.closed and any("did not take the last steps" in line for line in said)
    server.hangs.set()


def test_a_run_that_fails_is_closed_as_failed(make_config: Make, server: Server) -> None:
    config = make_config(tracking={"to": ["wandb"]})
    with pytest.raises(ZeroDivisionError), RunDir(config) as run, tracked(run.path, config, lambda line: None):
        raise ZeroDivisionError
    assert server.closed == [True]


def test_one_that_is_named_and_not_installed_is_an_error_at_the_start(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = make_config(tracking={"to": ["tensorboard", "wandb", "mlflow"]})
    with pytest.raises(ConfigError, match=r"names wandb, mlflow, which .* pip install 'respec-rl\[wandb,mlflow\]'"):
        refuse_missing(config.tracking)
    refuse_missing(make_config(tracking={"to": ["tensorboard"]}).tracking)


def history_of_mlflow(run_dir: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    known = MlflowClient().get_metric_history(
        json.loads((run_dir / "tracking/mlflow.json").read_text())["id"], "reward/mean"
    )
    assert len({metric.step for metric in known}) == len(known)
    return {metric.step: metric.value for metric in known}


def history_of_trackio(run_dir: Path) -> dict[int, float]:
    name = json.loads((run_dir / "tracking/trackio.json").read_text())["id"]
    (file,) = (run_dir.parent / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics where run_name = ?", (name,)).fetchall()
    assert len(dict(rows)) == len(rows)
    return {step: json.loads(metrics)["reward/mean"] for step, metrics in rows}


def history_of_wandb(run_dir: Path) -> dict[int, float]:
    pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    history, ids = {}, set()
    for file in sorted((run_dir / "tracking/wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()[7:]):
            record = pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                assert row["step"] not in history
                history[row["step"]] = row["reward/mean"]
    assert ids == {json.loads((run_dir / "tracking/wandb.json").read_text())["id"]}
    return history


def leveldb_records(data: bytes) -> list[bytes]:
    """LevelDB's log format: blocks of 32 KiB, the first 7 bytes gone here; a record's header is checksum, length, and whether it is whole,
    first, middle or last."""
    records, part, at = [], b"", 0
    while at + 7 <= len(data):
        left = 32768 - (at + 7) % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:
            break
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(part)
            part = b""
    return records


@pytest.mark.parametrize(
    ("name", "history"), [("wandb", history_of_wandb), ("trackio", history_of_trackio), ("mlflow", history_of_mlflow)]
)
def test_what_the_real_trackers_keep(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, history: Callable[[Path], Any]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip(name)  # after its environment, which some read then
    config, said = make_config(tracking={"to": [name]}), []
    run_steps(config, range(4), said)
    run_steps(config, range(3, 6), said, cut=2)
    assert not [line for line in said if "failed" in line or "did not" in line]
    deadline = time.monotonic() + 20
    while history(tmp_path / "run") != {step: step / 8 for step in range(6)} and time.monotonic() < deadline:
        time.sleep(0.2)
    assert history(tmp_path / "run") == {step: step / 8 for step in range(6)}
