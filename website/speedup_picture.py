"""Draws docs/speedup_by_batch.svg from the recorded benchmark: python website/speedup_picture.py"""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "auto_smollm2.json"
PICTURE = ROOT / "docs" / "speedup_by_batch.svg"
COLOURS = {"suffix:8": "#e08a00", "eagle:2": "#7fa8d9", "eagle:5": "#2f6db5", "auto": "#c2185b"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 56, 110, 20, 48
LOW, HIGH = 0.6, 2.4


def main() -> None:
    rows = json.loads(RECORDED.read_text())["rows"]
    batches = sorted({row["batch"] for row in rows})

    def at(batch: int, ratio: float) -> tuple[float, float]:
        share = math.log2(batch) / math.log2(batches[-1])
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - ratio) / (HIGH - LOW)

    parts = [
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "sequences decoded at once"),
        _text(LEFT, 14, "tokens/s over plain decoding", "start"),
    ]
    for tenths in range(6, 25, 2):
        y = at(1, tenths / 10)[1]
        stroke = "#555" if tenths == 10 else "#ddd"
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{stroke}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenths / 10:.1f}x", "end"))
    parts += [_text(at(batch, LOW)[0], HEIGHT - BOTTOM + 20, str(batch)) for batch in batches]
    for name, colour in COLOURS.items():
        curve = [at(row["batch"], row["ratio"]) for row in rows if row["variant"] == name]
        curve.sort()
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
        width = 3.5 if name == "auto" else 1.8
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in curve]
    ends = sorted((at(batches[-1], row["ratio"])[1], row["variant"]) for row in rows if row["batch"] == batches[-1])
    below = 0.0
    for y, name in ends:
        if name in COLOURS:
            below = max(y, below + 16)
            parts.append(_text(WIDTH - RIGHT + 12, below + 4, name, "start", COLOURS[name]))
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    main()
