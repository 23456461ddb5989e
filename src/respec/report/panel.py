"""The live panel: a pure function from what is known of a run to something rich can draw, at 80 columns or more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.box import ROUNDED
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
# Names, colours and the metrics they sum; what is left of a step is `other`.
SPLIT = (
    ("generation", "cyan", ("time/generation_s",)),
    ("reward", "yellow", ("time/reward_s",)),
    ("training", "magenta", ("time/training_s", "time/critic_s")),
)
# Measuring a run is no part of what a step costs it.
ASIDE = ("time/eval_s", "time/compare_s")


@dataclass
class State:
    """What a view knows. Times are of one monotonic clock, in seconds."""

    title: str
    steps: int
    began: float
    phase: str = ""
    phase_began: float = 0.0
    total: int | None = None
    done: int = 0
    note: str = ""
    step: int = 0
    first_step_at: float | None = None
    first_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    reward_R: list[float] = field(default_factory=list)
    accuracy_R: list[float] = field(default_factory=list)

    def begin(self, name: str, total: int | None, now: float) -> None:
        self.phase, self.total, self.phase_began, self.done, self.note = name, total, now, 0, ""

    def take(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        if self.first_step_at is None:
            self.first_step_at, self.first_step = now, step
        self.step = step
        self.metrics.update(metrics)
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self.reward_R.append(metrics["reward/mean"])
        if math.isfinite(metrics.get("eval/accuracy", math.nan)):
            self.accuracy_R.append(metrics["eval/accuracy"])


def sparkline(values: list[float], width: int) -> str:
    """Bars of the last values; when there are more than `width`, means of equal stretches of all of them."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    span = high - low
    return "".join(SPARKS[int((v - low) / span * 7.999) if span > 0 else 3] for v in values)


def split_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's seconds by part: generation, reward, training, other; evaluation, comparison and saving are left out."""

    def seconds(key: str) -> float:
        value = metrics.get(key, 0.0)
        return value if math.isfinite(value) else 0.0

    parts = {name: sum(seconds(key) for key in keys) for name, _, keys in SPLIT}
    other = seconds("time/step_s") - sum(seconds(key) for key in ASIDE) - sum(parts.values())
    return {**parts, "other": max(0.0, other)}


def panel(state: State, now: float, width: int) -> Panel:
    """The whole panel, `width` columns wide and at most fourteen lines high."""
    inner = max(40, width - 6)
    blocks = [_progress(state, now, inner), Text(), *_figures(state, inner)]
    if sum(split_of(state.metrics).values()) > 0:
        blocks += [Text(), *_split(state.metrics, inner)]
    return Panel(
        Group(*blocks),
        title=Text(f" respec · {state.title} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {clock(now - state.began)} ", style="dim"),
        subtitle_align="right",
        box=ROUNDED,
        border_style="bright_black",
        padding=(0, 2),
        width=width,
    )


def clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def _progress(state: State, now: float, inner: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=12, no_wrap=True)
    beside = max(30, inner // 3)
    table.add_column(width=max(10, inner - beside - 16))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=beside)
    left = ""
    if state.first_step_at is not None and state.step > state.first_step:
        pace = (now - state.first_step_at) / (state.step - state.first_step)
        left = f"about {clock(pace * (state.steps - state.step))} left" if state.step < state.steps else "done"
    table.add_row(
        Text("step", style="bold"),
        _bar(state.step, state.steps, "green"),
        Text.assemble((f"{state.step}/{state.steps}", "bold"), "  ", (left, "dim")),
    )
    if state.phase:
        note = Text(state.note, style="dim") if state.note else Text(clock(now - state.phase_began), style="dim")
        of = f"{state.done}/{state.total}  " if state.total else ""
        table.add_row(
            Text(state.phase, style="cyan", overflow="ellipsis"),
            _bar(state.done, state.total, "cyan"),
            Text.assemble(of, note),
        )
    else:
        table.add_row("", "", "")
    return table


def _bar(done: int, total: int | None, style: str) -> ProgressBar:
    full = float(total or 1)
    return ProgressBar(full, min(full, done), complete_style=style, finished_style=style, style="bright_black")


def _figures(state: State, inner: int) -> list[Table]:
    metrics = state.metrics
    first = Table.grid(padding=(0, 2))
    first.add_column(width=12, style="dim")
    first.add_column(width=18, no_wrap=True)
    first.add_column(no_wrap=True)
    reward = Text("–", style="dim")
    if state.reward_R:
        begin = f"   from {state.reward_R[0]:.3f}" if len(state.reward_R) > 1 else ""
        reward = Text.assemble((f"{state.reward_R[-1]:.3f}", "bold green"), (begin, "dim"))
    first.add_row("reward", reward, Text(sparkline(state.reward_R, inner - 36), style="green"))
    accuracy, history = Text("–", style="dim"), ""
    if state.accuracy_R:
        error = metrics.get("eval/se")
        accuracy = Text.assemble(
            (f"{state.accuracy_R[-1]:.1%}", "bold"), (f" ± {error:.1%}" if error is not None else "", "dim")
        )
        if len(state.accuracy_R) > 1:
            history = f"{state.accuracy_R[-1] - state.accuracy_R[0]:+.1%} since the start".replace("%", " points")
    first.add_row("held-out", accuracy, Text(history, style="dim"))

    second = Table.grid(padding=(0, 2))
    columns = 2 if inner < 100 else 3
    for _ in range(columns):
        second.add_column(width=12, style="dim", no_wrap=True)
        second.add_column(width=(inner - 16 * columns + 2) // columns, no_wrap=True)
    cells = [
        ("tokens/s", _value(metrics, "rollout/tokens_per_s", "{:,.0f}")),
        ("accepted", _value(metrics, "rollout/accepted_length", "{:.2f} tokens")),
        ("length", _value(metrics, "length/mean", "{:.0f}") + _value(metrics, "length/max", " (max {:.0f})", "")),
        ("speedup", _speedup(metrics)),
        ("entropy", _value(metrics, "policy/entropy", "{:.3f} nats")),
        ("grad norm", _value(metrics, "policy/grad_norm", "{:.3g}")),
    ]
    for start in range(0, len(cells), columns):
        second.add_row(*(text for cell in cells[start : start + columns] for text in cell))
    return [first, second]


def _value(metrics: Mapping[str, float], name: str, form: str, absent: str = "–") -> str:
    value = metrics.get(name)
    return absent if value is None or not math.isfinite(value) else form.format(value)


def _speedup(metrics: Mapping[str, float]) -> str:
    text = _value(metrics, "rollout/speedup", "{:.2f}x")
    identical = metrics.get("rollout/tokens_identical")
    return text if identical is None else f"{text}, {'identical' if identical >= 1 else 'NOT identical'}"


def _split(metrics: Mapping[str, float], inner: int) -> list[Text]:
    parts = split_of(metrics)
    whole = sum(parts.values()) or 1.0
    colours = {name: colour for name, colour, _ in SPLIT} | {"other": "bright_black"}
    bar, used, gone = Text(), 0, 0.0
    for name, seconds in parts.items():
        gone += seconds
        cells = round(gone / whole * inner) - used
        used += cells
        bar.append("━" * cells, style=colours[name])
    legend = Text()
    for name, seconds in parts.items():
        legend.append("■ ", style=colours[name])
        legend.append(f"{name} {seconds / whole:.0%}  ")
    legend.append(f"of {whole:.1f} s", style="dim")
    return [bar, legend]
