from __future__ import annotations

from pathlib import Path

from respec.report.metrics import METRICS
from respec.report.metrics_page import metrics_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_a_row_for_each_metric() -> None:
    rows = [line for line in metrics_page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted(
        METRICS,
        key=lambda name: list(dict.fromkeys(n.partition("/")[0] for n in METRICS)).index(name.partition("/")[0]),
    )
    for row in rows:
        assert row.replace("\\|", "").count("|") == 5, row


def test_the_documentation_is_that_page() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), "write it anew: respec metrics > docs/metrics.md"
