"""What a person watches while a run goes on: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from respec.report.panel import State, panel

PLAIN_EVERY_S = 10.0


class View(Protocol):
    """What the loop tells whoever watches. All calls are cheap; none fails a run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str, total: int | None = None) -> None:
        """A part of the run begins (`generation`, `training`, ...), of `total` units if they can be counted."""
        ...

    def advance(self, done: int, note: str = "") -> None:
        """So many of the phase's units are done in all; `note` is a short remark shown beside."""
        ...

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        """Step `step` is complete. Metrics named as in `metrics.METRICS`; those not given keep their last value. `past`: it was told before the
        run was stopped."""
        ...

    def say(self, line: str) -> None:
        """A line to be kept."""
        ...

    def close(self) -> None: ...


def open_view(title: str, steps: int, console: Console | None = None) -> View:
    """A TerminalView if standard output is a terminal that can move its cursor, else a PlainView. `steps`: of the run."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(title, steps, console)
    return PlainView(title, steps)


class TerminalView:
    """A panel that is redrawn four times a second below the lines that were said."""

    def __init__(self, title: str, steps: int, console: Console | None = None):
        self._state = State(title, steps, began=time.monotonic())
        console = console or Console()
        self._live = Live(
            console=console,
            get_renderable=lambda: panel(self._state, time.monotonic(), console.width),
            refresh_per_second=4,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str, total: int | None = None) -> None:
        self._state.begin(name, total, time.monotonic())

    def advance(self, done: int, note: str = "") -> None:
        self._state.done, self._state.note = done, note

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        self._state.take(step, metrics, time.monotonic())

    def say(self, line: str) -> None:
        self._live.console.print(Text(line))

    def close(self) -> None:
        """Leaves the last panel standing. Closing twice does nothing."""
        if self._live.is_started:
            self._state.begin("", None, time.monotonic())
            self._live.stop()


class PlainView:
    """Lines for logs: one a step, one when a kind of phase is first entered, and progress at most every ten seconds."""

    def __init__(
        self,
        title: str,
        steps: int,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write = write or _print
        self._clock = clock
        self._state = State(title, steps, began=clock())
        self._seen: set[str] = set()
        self._spoke = clock()
        self._line(f"{title}: {steps} steps")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str, total: int | None = None) -> None:
        self._state.begin(name, total, self._clock())
        if name not in self._seen:
            self._seen.add(name)
            self._line(name)

    def advance(self, done: int, note: str = "") -> None:
        self._state.done, self._state.note = done, note
        if self._clock() - self._spoke >= PLAIN_EVERY_S:
            of = f"{done}/{self._state.total}" if self._state.total else str(done)
            self._line(f"{self._state.phase} {of}{'  ' + note if note else ''}")

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        self._state.take(step, metrics, self._clock())
        if past:
            return
        parts = [f"{label} {metrics[name]:{form}}{unit}" for name, label, form, unit in PLAIN_STEP if name in metrics]
        self._line(f"step {step}/{self._state.steps}  " + "  ".join(parts))

    def say(self, line: str) -> None:
        self._line(line)

    def close(self) -> None:
        pass

    def _line(self, line: str) -> None:
        self._spoke = self._clock()
        passed = int(self._spoke - self._state.began)
        self._write(f"[{passed // 60:02d}:{passed % 60:02d}] {line}")


PLAIN_STEP = (
    ("reward/mean", "reward", ".3f", ""),
    ("eval/accuracy", "held-out", ".3f", ""),
    ("length/mean", "length", ".1f", ""),
    ("policy/entropy", "entropy", ".3f", ""),
    ("rollout/tokens_per_s", "tokens/s", ".0f", ""),
    ("rollout/accepted_length", "accepted", ".2f", ""),
    ("rollout/speedup", "speedup", ".2f", "x"),
    ("time/step_s", "time", ".1f", " s"),
)


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
