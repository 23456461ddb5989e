"""The trackers a run can be followed by, one function each: it opens, or opens again, the run there and says how to hand it a step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from respec.config import Config
from respec.report.run_dir import flat, tree_of


@dataclass(frozen=True)
class Start:
    """`id`: what the tracker called the run when it was opened before, '' the first time. `folder`: for what it keeps on this machine."""

    id: str
    name: str
    folder: Path
    config: Config

    @property
    def settings(self) -> dict[str, Any]:
        """`section.key` -> value."""
        return flat(tree_of(self.config))


@dataclass(frozen=True)
class Tracker:
    """`where`: an address or folder for a person to look at. `log(step, time, metrics)`; `close(failed)`. All may raise, or take long."""

    id: str
    where: str
    log: Callable[[int, float, Mapping[str, float]], None]
    close: Callable[[bool], None]


def open_wandb(start: Start) -> Tracker:
    """Weights & Biases (wandb.ai, or offline by WANDB_MODE=offline)."""
    import wandb  # pyright: ignore[reportMissingImports]

    # silent: it would print across the live view, and ask for a key there
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)
    run = wandb.init(
        project=start.config.tracking.project, name=start.name, id=start.id or None, resume="allow", dir=start.folder, config=start.settings, settings=settings,
    )  # fmt: skip
    run.define_metric("*", step_metric="step")

    def log(step: int, time: float, metrics: Mapping[str, float]) -> None:
        run.log({**metrics, "step": step, "_timestamp": time}, step=step)

    where = f"offline in '{run.dir}', for `wandb sync`" if run.offline else str(run.url)
    return Tracker(run.id, where, log, lambda failed: run.finish(exit_code=int(failed)))


def open_trackio(start: Start) -> Tracker:
    """trackio, on this machine; or where TRACKIO_SPACE_ID says. It knows a run by its name, so the name is made one that no other has."""
    import trackio  # pyright: ignore[reportMissingImports]

    run = trackio.init(
        project=start.config.tracking.project, name=start.id or f"{start.name}-{secrets.token_hex(3)}", config=start.settings,
        resume="allow", embed=False, auto_log_cpu=False, auto_log_gpu=False,
    )  # fmt: skip

    def log(step: int, time: float, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return Tracker(run.name, "", log, lambda failed: run.finish())


def open_mlflow(start: Start) -> Tracker:
    """MLflow, on the server or in the store that MLFLOW_TRACKING_URI names."""
    from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client, project = MlflowClient(), start.config.tracking.project
    if start.id:
        run_id = start.id
        client.update_run(run_id, status="RUNNING")
    else:
        experiment = client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
        run_id = client.create_run(experiment_id, run_name=start.name).info.run_id
        # it takes each setting once, and no more than so many characters
        settings = [Param(key, str(value)[:6000]) for key, value in start.settings.items()]
        for first in range(0, len(settings), 100):
            client.log_batch(run_id, params=settings[first : first + 100])

    def log(step: int, time: float, metrics: Mapping[str, float]) -> None:
        client.log_batch(
            run_id, metrics=[Metric(name, value, int(1000 * time), step) for name, value in metrics.items()]
        )

    def close(failed: bool) -> None:
        client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    return Tracker(run_id, str(client.tracking_uri), log, close)


OPEN: dict[str, Callable[[Start], Tracker]] = {"wandb": open_wandb, "trackio": open_trackio, "mlflow": open_mlflow}
