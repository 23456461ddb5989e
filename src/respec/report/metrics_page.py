"""The table of all metrics as a page of Markdown, docs/metrics.md."""

from __future__ import annotations

from respec.report.metrics import METRICS

HEAD = """# Metrics

Every number that a run records, under the one name it has everywhere: in `metrics.jsonl`, TensorBoard, Weights & Biases, trackio, MLflow, the report
and the live page. A step has those that apply to it; step 0 is the policy before reinforcement learning. A `*` stands for the name of a
reward function or of a task. This page is what `respec metrics` prints.
"""


def metrics_page() -> str:
    """The page, with a table for each room of names, in the order of report/metrics.py."""
    lines = [HEAD]
    order = dict.fromkeys(_room(name) for name in METRICS)
    for room in order:
        lines += [f"## {room}\n", "| name | unit | what it is | of a step's values |", "|---|---|---|---|"]
        for name, entry in METRICS.items():
            if _room(name) == room:
                cells = (f"`{name}`", entry.unit, entry.meaning, entry.reduction)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _room(name: str) -> str:
    return name.partition("/")[0]
