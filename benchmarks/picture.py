"""Curves as an SVG picture, for pages that show pictures and run nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
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
