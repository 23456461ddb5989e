"""Trackers follow a run from beside it: each is a thread that reads metrics.jsonl as it grows and hands on what is new.

The loop knows nothing of them, so they cannot stop or slow it. One that fails says so once, and is left behind; what it missed it is given when the
run is gone on with. What each is called in its tracker and how far it got is in the run folder, tracking/NAME.json.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from respec.config import Config, TrackingConfig
from respec.errors import ConfigError
from respec.report.records import write_atomic
from respec.report.tail import Tail
from respec.report.trackers import OPEN, Start

TRACKING = "tracking"
POLL_S = 1.0
# How long a run that is over waits for its trackers to take what is left.
CLOSING_S = 30.0
# Characters of an error that are shown.
SAID = 400


@dataclass(frozen=True)
class Reached:
    """What a tracker calls the run ('' before it was told of it), and the last step handed to it."""

    id: str = ""
    step: int = -1


def refuse_missing(tracking: TrackingConfig) -> None:
    """Raises ConfigError for a tracker that is named and not installed. Without tensorboard a run goes on: see RunDir."""
    missing = [name for name in tracking.to if name in OPEN and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tracking.to names {', '.join(missing)}, which is not installed; pip install 'respec-rl[{','.join(missing)}]', or leave it out"
        )


@contextlib.contextmanager
def tracked(run_dir: Path, config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """The trackers that are named follow the run until its end, and then for at most CLOSING_S."""
    over = Over()
    names = [name for name in dict.fromkeys(config.tracking.to) if name in OPEN]
    threads = [
        threading.Thread(target=_follow, args=(run_dir, name, config, say, over), name=f"tracker {name}", daemon=True)
        for name in names
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        over.failed = True
        raise
    finally:
        over.event.set()
        until = time.monotonic() + CLOSING_S
        for name, thread in zip(names, threads, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                over.say_nothing.add(name)
                say(
                    f"{name} did not take the last steps within {CLOSING_S:.0f} s; it gets them if the run is gone on with"
                )


class Over:
    """Says to all trackers that the run is over, and whether by an error."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.failed = False
        self.say_nothing: set[str] = set()


def _follow(run_dir: Path, name: str, config: Config, say: Callable[[str], None], over: Over) -> None:
    """One tracker's thread."""
    try:
        folder = run_dir / TRACKING
        folder.mkdir(exist_ok=True)
        reached = _read(folder / f"{name}.json")
        tracker = OPEN[name](Start(reached.id, config.tracking.name or run_dir.resolve().name, folder, config))
        if tracker.where:
            say(f"{name}: {tracker.where}")
        tail = Tail(run_dir)
        last = False
        while not last:
            last = over.event.is_set()
            new = [record for record in tail.read()[1] if record.step > reached.step]
            for record in new:
                finite = {metric: value for metric, value in record.metrics.items() if math.isfinite(value)}
                tracker.log(record.step, record.time, finite)
            if new or reached.id != tracker.id:
                reached = Reached(tracker.id, new[-1].step if new else reached.step)
                write_atomic(folder / f"{name}.json", json.dumps(asdict(reached)))
            if not last:
                over.event.wait(POLL_S)
        tracker.close(over.failed)
    except BaseException as error:  # some of them exit
        if name not in over.say_nothing:
            said = textwrap.shorten(str(error), SAID, placeholder=" ...")
            say(f"{name} failed ({type(error).__name__}: {said}); the run goes on without it")


def _read(path: Path) -> Reached:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Reached(str(tree["id"]), int(tree["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Reached()
