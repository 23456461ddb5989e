"""A picture of what a decode round costs: measured points, and the model's line through them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import plotly.graph_objects as go


class Sample(Protocol):
    """One measured round."""

    @property
    def active(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def context(self) -> float: ...
    @property
    def drafter(self) -> str: ...
    @property
    def verify_s(self) -> float: ...
    @property
    def overhead_s(self) -> float: ...


class Cost(Protocol):
    """Predicts seconds of rounds."""

    def seconds(
        self, active: int, rows_P: np.ndarray, context: float, drafter_P: Sequence[str], s_P: np.ndarray
    ) -> np.ndarray: ...


def write_surface(path: Path, samples: Sequence[Sample], cost: Cost) -> None:
    """One self-contained page: milliseconds of a round without drafting over rows in the pass, a colour a batch."""
    figure = go.Figure()
    plain = [sample for sample in samples if sample.drafter == "off"]
    for batch in sorted({sample.active for sample in plain}):
        points = sorted((s for s in plain if s.active == batch), key=lambda s: s.rows)
        rows = np.unique(np.linspace(points[0].rows, points[-1].rows, 60).round())
        context = float(np.median([s.context for s in points]))
        line = cost.seconds(batch, rows, context, ["off"] * len(rows), np.zeros(len(rows)))
        name = f"batch {batch}"
        figure.add_scatter(
            x=[s.rows for s in points], y=[1000 * (s.verify_s + s.overhead_s) for s in points], mode="markers", name=name,
            legendgroup=name, text=[f"context {s.context:.0f}" for s in points],
        )  # fmt: skip
        figure.add_scatter(x=rows, y=1000 * line, mode="lines", name=name, legendgroup=name, showlegend=False)
    figure.update_layout(
        title="A decode round's cost", xaxis_title="tokens in the pass (sequences plus drafts)", yaxis_title="milliseconds",
        xaxis_type="log", yaxis_type="log", template="plotly_white",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))
