"""Curves as an SVG picture, for pages that show pictures and run nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#393b79",
    "#637939",
)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 420, 60, 36, 210, 46

Curve = Sequence[tuple[float, float]]


def curves(path: Path, title: str, x_name: str, y_name: str, named: Mapping[str, Curve]) -> None:
    """One line a name, all on the same axes; x from 0, y from the least to the greatest value."""
    points = [point for curve in named.values() for point in curve]
    x_most, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    spread = (high - low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_most, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (
            y - low
        ) / spread

    parts = [_text(LEFT, 22, title, size=15), _text((WIDTH - RIGHT) / 2, HEIGHT - 8, x_name), _text(4, TOP - 6, y_name)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * spread
        x, y = at(0, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 42, y + 4, f"{value:.2f}"))
        parts.append(_text(at(share * x_most, low)[0] - 14, HEIGHT - BOTTOM + 18, f"{share * x_most:,.0f}"))
    for index, (name, curve) in enumerate(named.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 10 + 19 * index, name, colour))
    _write(path, parts, HEIGHT)


@dataclass(frozen=True)
class Panel:
    """A curve with axes of its own; `dots` are (x, y, half the height of their bar)."""

    title: str
    line: Curve
    dots: Sequence[tuple[float, float, float]]


def panels(path: Path, shown: Sequence[Panel], x_name: str) -> None:
    """Small pictures in rows of three, x and y each from its own least to its own greatest value."""
    across, width, height = 3, WIDTH / 3, 190
    rows = -(-len(shown) // across)
    parts = [_text(LEFT, rows * height + 18, x_name)]
    for index, panel in enumerate(shown):
        left, top = index % across * width + 44, index // across * height + 30
        parts += _panel(panel, left, top, width - 64, height - 60)
    _write(path, parts, rows * height + 30)


def _panel(panel: Panel, left: float, top: float, width: float, height: float) -> list[str]:
    x_most = max(x for x, *_ in (*panel.line, *panel.dots))
    values = [y for _, y in panel.line] + [y + sign * half for _, y, half in panel.dots for sign in (-1, 1)]
    low, spread = min(values), (max(values) - min(values)) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + width * x / x_most, top + height * (1 - (y - low) / spread)

    parts = [_text(left, top - 10, panel.title, size=13)]
    for share in (0.0, 0.5, 1.0):
        y = at(0, low + share * spread)[1]
        parts.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + width:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 34, y + 4, f"{low + share * spread:.2f}"))
        parts.append(_text(left + share * width - 6, top + height + 16, f"{share * x_most:.0f}"))
    line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in panel.line)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.8"/>')
    for x, y, half in panel.dots:
        (across, upper), (_, lower), (_, middle) = at(x, y + half), at(x, y - half), at(x, y)
        parts.append(
            f'<line x1="{across:.1f}" y1="{upper:.1f}" x2="{across:.1f}" y2="{lower:.1f}" stroke="{COLOURS[1]}" stroke-width="1.5"/>'
        )
        parts.append(f'<circle cx="{across:.1f}" cy="{middle:.1f}" r="3" fill="{COLOURS[1]}"/>')
    return parts


def _write(path: Path, parts: Sequence[str], height: float) -> None:
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>\n{body}\n</svg>\n'
    )


def mean_curve(runs: Sequence[Mapping[str, Sequence[float]]], y: str, x: str, window: int) -> Curve:
    """The mean over runs, step by step as far as all of them go, of a running mean over the last `window` steps."""
    count = min(len(run[y]) for run in runs)
    smooth = [
        [sum(part) / len(part) for i in range(count) if (part := run[y][max(0, i - window + 1) : i + 1])]
        for run in runs
    ]
    return [
        (sum(run[x][i] for run in runs) / len(runs), sum(line[i] for line in smooth) / len(runs)) for i in range(count)
    ]


def _text(x: float, y: float, what: str, colour: str = "#333", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}">{escape(what)}</text>'
