"""The section of trackers: where a run's metrics go beside its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from respec.config.room import Room

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class TrackingConfig(Room):
    """Trackers that follow metrics.jsonl, by name. Where each keeps its data and how it logs in is set as it documents, by its environment."""

    to: tuple[Tracker, ...] = ("tensorboard",)
    project: str = Field(default="respec", min_length=1, description="mlflow: the experiment")
    name: str = Field(default="", description="of the run; '': as its folder")


def moved(tree: Any) -> Any:
    """A configuration's tree with `report.tensorboard`, where it is said, in its place of today: [tracking] to. Raises ValueError."""
    report = tree.get("report") if isinstance(tree, Mapping) else None
    if not isinstance(report, Mapping) or "tensorboard" not in report:
        return tree
    wanted, rest = report["tensorboard"], {key: value for key, value in report.items() if key != "tensorboard"}
    if not isinstance(wanted, bool):
        raise ValueError(
            f"report.tensorboard is now tracking.to = ['tensorboard'], and was a boolean, true or false; got {wanted!r}"
        )
    tracking = tree.get("tracking") or {}
    if "to" not in tracking and not wanted:
        tracking = {**tracking, "to": ()}
    return {**tree, "report": rest, "tracking": tracking}
