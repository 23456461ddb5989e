from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from respec.report.live import PlainView, TerminalView, open_view
from respec.report.panel import State, panel, sparkline, split_of

METRICS = {
    "reward/mean": 0.5,
    "eval/accuracy": 0.5512,
    "eval/se": 0.021,
    "length/mean": 1234.5,
    "length/max": 4096.0,
    "policy/entropy": 0.4321,
    "policy/grad_norm": 123.456,
    "rollout/tokens_per_s": 123456.0,
    "rollout/accepted_length": 12.34,
    "rollout/speedup": 1.87,
    "rollout/tokens_identical": 0.0,
    "time/generation_s": 6.0,
    "time/reward_s": 1.0,
    "time/training_s": 2.0,
    "time/eval_s": 4.0,
    "time/step_s": 14.0,
}


def drawn(state: State, width: int, now: float = 4000.0) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True)
    console.print(panel(state, now, width))
    return console.export_text().splitlines()


def full_state() -> State:
    state = State("arithmetic", 1000, 0.0)
    for step in range(1, 300):
        state.take(step, {**METRICS, "reward/mean": step / 300}, float(step))
    state.begin("generation", 100_000, 3990.0)
    state.done, state.note = 50_000, "active 64, suffix s=6, and more than fits into the line"
    return state


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("state", [State("a run", 40, 0.0), full_state()])
def test_the_panel_fits_the_terminal(width: int, state: State) -> None:
    lines = drawn(state, width)
    assert len(lines) <= 14 and all(len(line) == width for line in lines)


def test_the_panel_shows_what_a_run_is_watched_for() -> None:
    text = "\n".join(drawn(full_state(), 80))
    for part in ("299/1000", "0.997", "55.1% ± 2.1%", "123,456", "12.34", "1.87x, NOT identical", "generation"):
        assert part in text
    # evaluation is no part of the step that is split: 6 + 1 + 2 of 10 s
    for part in ("generation 60%", "reward 10%", "training 20%", "other 10%"):
        assert part in text


def test_metrics_that_are_not_finite_do_not_break_the_panel() -> None:
    state = State("run", 3, 0.0)
    state.take(1, dict.fromkeys(METRICS, math.nan) | {"time/step_s": 1.0}, 1.0)
    assert "reward" in "\n".join(drawn(state, 80))


def test_a_split_never_has_negative_parts() -> None:
    parts = split_of({"time/generation_s": 3.0, "time/step_s": 2.0})
    assert parts == {"generation": 3.0, "reward": 0.0, "training": 0.0, "other": 0.0}


def test_a_sparkline_spans_all_values() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▄█"
    assert sparkline([1.0, 1.0], 10) == "▄▄" and sparkline([], 10) == "" and sparkline([1.0], 0) == ""
    many = sparkline([float(i) for i in range(1000)], 20)
    assert len(many) == 20 and many == "".join(sorted(many)) and many[0] == "▁" and many[-1] == "█"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_are_few() -> None:
    lines: list[str] = []
    clock = Clock()
    with PlainView("demo", 3, lines.append, clock) as view:
        for step in range(1, 4):
            for name in ("generation", "training"):
                view.phase(name, 100)
                for done in range(100):
                    clock.now += 0.01
                    view.advance(done)
            view.step(step, METRICS)
        view.say("a word")
    assert [line.split("] ")[1].split("  ")[0] for line in lines] == [
        *("demo: 3 steps", "generation", "training", "step 1/3", "step 2/3", "step 3/3", "a word")
    ]
    assert lines[3].startswith("[00:02] step 1/3  reward 0.500  held-out 0.551")


def test_plain_progress_of_a_long_phase_is_told_every_ten_seconds() -> None:
    lines: list[str] = []
    clock = Clock()
    view = PlainView("demo", 3, lines.append, clock)
    view.phase("warm-up", 60)
    for done in range(1, 61):
        clock.now += 1.0
        view.advance(done, "loss 1.25")
    assert [line for line in lines if "/60" in line] == [
        f"[{s // 60:02d}:{s % 60:02d}] warm-up {s}/60  loss 1.25" for s in range(10, 61, 10)
    ]


def test_the_view_follows_the_kind_of_output() -> None:
    assert isinstance(open_view("run", 1, Console(file=io.StringIO())), PlainView)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    assert isinstance(open_view("run", 1, console), PlainView)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm-256color"})
    with open_view("run", 1, console) as view:
        assert isinstance(view, TerminalView)


def test_what_was_said_stays_above_the_last_panel_even_after_an_error() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm-256color"})
    with pytest.raises(RuntimeError), TerminalView("run", 2, console) as view:
        view.phase("generation", 4)
        view.advance(2)
        view.step(1, METRICS)
        view.say("checkpoint [written] to runs/demo")
        raise RuntimeError
    text = out.getvalue()
    assert text.index("checkpoint [written] to runs/demo") < text.rindex("held-out")
    assert text.endswith("\x1b[?25h"), "the cursor must be given back"
