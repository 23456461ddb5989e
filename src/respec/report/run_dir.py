"""The run folder: what a run was told, what made it, and everything it did, in files that survive being killed."""

from __future__ import annotations

import json
import os
import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from respec.config import Config, parse_config
from respec.errors import ConfigError, RunDirError
from respec.report import events, laws, lock, records
from respec.report.events import EVENTS, Events
from respec.report.provenance import provenance, usable_cores
from respec.report.records import DECISIONS, METRICS_FILE, ROLLOUTS, ROUNDS, StepMetrics, write_atomic
from respec.types import RoundRecord, ScoredRollout

CONFIG_FILE = "config.toml"
PROVENANCE_FILE = "provenance.json"
SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
# What may change when a run is gone on with: how long, how often it is measured and saved, where the folder was moved to.
MAY_DIFFER = ("run.steps", "run.dir", "run.compare_plain_every", "report.", "tracking.", "checkpoint.", "eval.")


class RunDir:
    """A run folder, opened for writing by this process alone. Made by the loop; use it as a context manager.

    Attributes: `path`; `config`, the resolved configuration to run with (threads never 0); `resumed`, whether the folder held a
    run before; `notes`, lines the user should see. Steps are numbered by the loop, ascending.
    """

    def __init__(self, config: Config):
        """Creates or reopens `config.run.dir`.

        Raises RunDirError if a living process uses the folder, if it holds something that is no run, or if its run was made
        under a configuration that differs in what matters (the message names the keys and both values).
        """
        self.path = config.run.dir
        self._closed = True
        self._events: Events | None = None
        _prepare(self.path)
        note = lock.acquire(self.path)
        self.notes: list[str] = [note] if note else []
        try:
            self.resumed = (self.path / CONFIG_FILE).exists()
            self.config = self._settle(config)
            self._record_start()
            steps = self._cut_torn()
            wanted = "tensorboard" in self.config.tracking.to
            self._tensorboard = wanted and events.available()
            if wanted and not self._tensorboard:
                self.notes.append(
                    "tensorboard is not installed, so no events are written; metrics.jsonl holds the same"
                )
        except BaseException:
            lock.release(self.path)
            raise
        self._last = steps[-1].step if steps else None
        self._closed = False

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flushes the events and gives the folder free. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._close_events()
        lock.release(self.path)

    @property
    def last_step(self) -> int | None:
        """The last step that metrics.jsonl holds whole; None for none."""
        return self._last

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        rollouts: Sequence[ScoredRollout] = (),
        rounds: Sequence[RoundRecord] = (),
        pieces: Sequence[Sequence[str]] = (),
        decisions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Records a step. The line in metrics.jsonl comes last and makes the step count: it is on the disk on return.

        `rollouts` in canonical order, thinned as config.report says; `pieces` are the token texts of the first few, for the
        report. Raises ValueError for a step that does not come after the last one.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} comes after step {self._last} in '{self.path}'; cut back first")
        # A summary would tell of fewer steps than there are: a finished run that is lengthened is under way again.
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        tensorboard = self._opened_events()
        report = self.config.report
        if rollouts and step % report.rollout_every == 0:
            kept = rollouts[: report.rollouts_per_step or len(rollouts)]
            laws.write_laws(self.path, step, kept)
            records.write_rollouts(self.path, step, kept, pieces)
        if rounds:
            records.write_rounds(self.path, step, rounds)
        if decisions:
            records.write_decisions(self.path, step, decisions)
        record = StepMetrics(step, round(time.time(), 3), dict(metrics))
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(records.metrics_line(record))
            file.flush()
            os.fsync(file.fileno())
        self._last = step
        if tensorboard is not None:
            tensorboard.add(record)

    def cut_back(self, step: int) -> None:
        """Forgets everything after `step`, as if it had never happened (-1: everything): what will be generated again.

        Removes lines of metrics.jsonl, files of rollouts, rounds and decisions, summary and report; rebuilds the TensorBoard events.
        Checkpoints stay.
        """
        recorded_steps = records.read_metrics(self.path)
        steps = tuple(record for record in recorded_steps if record.step <= step)
        self._close_events()
        # Lines first: were we killed in between, files without a line are cut again at the next start.
        write_atomic(self.path / METRICS_FILE, "".join(records.metrics_line(record) for record in steps))
        for folder in (ROLLOUTS, ROUNDS, DECISIONS):
            for recorded in records.recorded_steps(self.path, folder):
                if recorded > step:
                    records.step_file(self.path, folder, recorded).unlink()
                    laws.law_file(self.path, recorded).unlink(missing_ok=True)
            for leftover in (self.path / folder).glob(".*.tmp"):
                leftover.unlink()
        if len(steps) < len(recorded_steps):
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            (self.path / "report.html").unlink(missing_ok=True)
        self._last = steps[-1].step if steps else None
        self._opened_events()

    def read_metrics(self) -> tuple[StepMetrics, ...]:
        """All recorded steps."""
        return records.read_metrics(self.path)

    def read_rollouts(self, step: int) -> tuple[ScoredRollout, ...]:
        """A step's recorded rollouts: see `records.read_rollouts`; with what mode `lossy` records beside them."""
        return laws.with_laws(self.path, step, records.read_rollouts(self.path, step))

    def rollout_steps(self) -> tuple[int, ...]:
        """The steps whose rollouts were recorded, ascending."""
        return records.recorded_steps(self.path, ROLLOUTS)

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Writes summary.json; returns its path."""
        write_atomic(self.path / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        return self.path / SUMMARY_FILE

    def _settle(self, config: Config) -> Config:
        """Resolves the threads, holds the configuration against the recorded one, and records it."""
        recorded = _recorded(self.path) if self.resumed else None
        threads = config.run.threads or (recorded.run.threads if recorded else usable_cores())
        settled = config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})
        if recorded is not None:
            differing = differences(recorded, settled)
            if differing and not any(step.step > 0 for step in records.read_metrics(self.path)):
                # it failed before its first step was done: what was mended must not be held against it
                self._forget_start()
            elif differing:
                raise RunDirError(
                    f"the run folder '{self.path}' belongs to a run with another configuration:\n"
                    + "".join(f"  {line}\n" for line in differing)
                    + "set them back to go on with that run, begin another with --set run.dir=..., or begin anew with --fresh"
                )
        for folder in (ROLLOUTS, ROUNDS, DECISIONS, CHECKPOINTS):
            (self.path / folder).mkdir(exist_ok=True)
        write_atomic(self.path / CONFIG_FILE, tomli_w.dumps(tree_of(settled)))
        return settled

    def _forget_start(self) -> None:
        """Empties the folder of a run that has done no step, for one of another configuration."""
        self.notes.append("the run that was begun here had done no step and had another configuration: it begins anew")
        for folder in (ROLLOUTS, ROUNDS, DECISIONS, CHECKPOINTS, EVENTS):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        for file in (METRICS_FILE, SUMMARY_FILE):
            (self.path / file).unlink(missing_ok=True)

    def _record_start(self) -> None:
        path = self.path / PROVENANCE_FILE
        try:
            starts = json.loads(path.read_text())["starts"] if path.exists() else []
        except (ValueError, KeyError, TypeError):
            starts = []
            self.notes.append(f"'{path}' was damaged; it begins anew with this start")
        now = provenance(self.config.run.threads)
        if starts:
            for what in ("versions", "processor", "gpu"):
                if starts[-1].get(what) != now[what]:
                    self.notes.append(
                        f"{what} changed since this run was last started ({_changed(starts[-1].get(what), now[what])}): what "
                        "follows may differ from what an uninterrupted run would have given"
                    )
        write_atomic(path, json.dumps({"starts": [*starts, now]}, indent=2) + "\n")

    def _cut_torn(self) -> tuple[StepMetrics, ...]:
        path = self.path / METRICS_FILE
        steps, whole = records.read_metrics_file(self.path)
        if path.exists() and path.stat().st_size > whole:
            os.truncate(path, whole)
            self.notes.append(f"a half-written last line of '{path}' was removed")
        return steps

    def _opened_events(self) -> Events | None:
        if not self._tensorboard:
            # Those of an earlier start would stop short of what metrics.jsonl will hold.
            shutil.rmtree(self.path / EVENTS, ignore_errors=True)
        elif self._events is None:
            self._events = Events(self.path, records.read_metrics(self.path))
        return self._events

    def _close_events(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def differences(recorded: Config, wanted: Config) -> tuple[str, ...]:
    """Lines `key: recorded value, now other value` for each key in which two configurations differ in what matters."""
    before, now = flat(tree_of(recorded)), flat(tree_of(wanted))
    keys = [key for key in dict.fromkeys([*before, *now]) if not key.startswith(MAY_DIFFER)]
    return tuple(
        f"{key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    )


def tree_of(config: Config) -> dict[str, Any]:
    """The configuration as TOML values; what is None is left out."""
    return _without_none(config.model_dump(mode="json"))


def _without_none(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return [_without_none(value) for value in node] if isinstance(node, list) else node


def flat(node: Any, at: str = "") -> dict[str, Any]:
    """`a.b` -> value of a tree of TOML values."""
    if isinstance(node, dict) or (isinstance(node, list) and any(isinstance(item, dict) for item in node)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {k: v for key, value in items for k, v in flat(value, f"{at}.{key}" if at else str(key)).items()}
    return {at: node}


def _prepare(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")
    except OSError as error:
        raise RunDirError(f"run.dir: '{path}' cannot be used as a run folder: {error}; name another") from None
    foreign = [item.name for item in path.iterdir() if item.name != lock.LOCK_FILE and not item.name.startswith(".")]
    if not (path / CONFIG_FILE).exists() and set(foreign) - {ROLLOUTS, ROUNDS, DECISIONS, CHECKPOINTS}:
        raise RunDirError(
            f"run.dir: '{path}' holds files ({', '.join(sorted(foreign)[:3])}) but no run; name an empty or new folder"
        )


def _recorded(path: Path) -> Config:
    file = path / CONFIG_FILE
    try:
        return parse_config(tomllib.loads(file.read_text(encoding="utf-8")), str(file))
    except (ConfigError, ValueError) as error:
        raise RunDirError(
            f"'{file}' cannot be read, so nobody can say whether this is the same run ({error}); was it edited, or made by "
            "another version of respec? Name another folder with --set run.dir=..."
        ) from None


def _changed(before: Any, now: Any) -> str:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"{before} -> {now}"
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in keys)
