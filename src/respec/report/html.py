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
SCRIPTS = ("page_base.js", "page.js")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


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
    scripts = [plotly(), *(part(name) for name in SCRIPTS)]
    return filled(
        title=html.escape(f"{data['name']} · respec"),
        head=f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{part("page.css")}</style>',
        brand="respec",
        scripts=f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts),
    )


def filled(**parts: str) -> str:
    """The page around `title`, `head`, `brand` and `scripts`, which are HTML."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], part("page.html"))


def plotly() -> str:
    """The plotting library, as it comes with the package of that name."""
    from plotly.offline import get_plotlyjs  # slow to import, and wanted by nothing else

    return get_plotlyjs()


def _embedded(data: dict) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def part(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("respec.report").joinpath(name).read_text(encoding="utf-8")
