"""The report: one HTML page that holds its data, style, script and plotting library, and asks the network for nothing."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path

from respec.report.page_data import collect
from respec.report.records import write_atomic

REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run folder, of whatever the run has done so far; returns its path.

    Raises RunDirError for a folder that holds no run, or one with a damaged file.
    """
    data = collect(run_dir)
    path = run_dir / REPORT_FILE
    write_atomic(path, render(data))
    return path


def render(data: dict) -> str:
    """The page for what `collect` gathered. Text from the run reaches it only as escaped JSON, and the page only as text."""
    from plotly.offline import get_plotlyjs  # slow to import, and wanted by nothing else

    parts = {
        "title": html.escape(f"{data['name']} · respec"),
        "style": _part("page.css"),
        "plotly": get_plotlyjs(),
        "data": _embedded(data),
        "script": _part("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], _part("page.html"))


def _embedded(data: dict) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files("respec.report").joinpath(name).read_text(encoding="utf-8")
