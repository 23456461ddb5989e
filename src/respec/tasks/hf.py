"""Rows of Hugging Face data sets: a local folder in any layout that `datasets` reads, or a hub id."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.models import hub
from respec.tasks.columns import Table

# What `Dataset.save_to_disk` leaves in a folder.
_SAVED = ("dataset_dict.json", "state.json")


def read_hf(config: TaskConfig, split: str, count: int | None = None) -> Table:
    """The rows of one split, in the order they are published in; under `task.streaming` the first `count`, of several subsets in equal shares.

    A folder is read in place, a hub id is fetched whole into the cache of `datasets`, or streamed without it. Where the hub cannot be
    reached a data set must be in that cache. Raises TaskError where `datasets` is not installed, and for a folder, subset, split or
    data set that is not there or has no rows.
    """
    try:
        import datasets
    except ImportError:
        raise TaskError(
            "task.kind = 'hf' needs the package datasets, which is not installed: pip install 'respec-rl[data]'"
        ) from None
    folder = hub.folder(config.dataset)
    _check(config.dataset, folder)
    datasets.disable_progress_bars()
    subsets = [name.strip() for name in config.subset.split(",")]
    share = -(-count // len(subsets)) if count is not None else None
    table: list[tuple[str, dict[str, Any]]] = []
    for subset in subsets:
        what = f"'{config.dataset}'" + (f", subset '{subset}'" if subset else "") + f", split '{split}'"
        try:
            with _as_reachable(datasets, folder):
                rows = _open(datasets, config, folder, subset, split)
                # streamed rows come one by one, so that none is fetched in vain
                part = list(islice(rows, share))
        except TaskError:
            raise
        except Exception as error:  # `datasets` raises kinds of its own, its file systems' and its readers'
            raise TaskError(f"the data set {what} cannot be read: {_first_line(error)}") from None
        table += [(f"row {number} of {what}", dict(row)) for number, row in enumerate(part, start=1)]
    if not table:
        raise TaskError(f"the data set '{config.dataset}' has no rows in split '{split}'")
    return table[:count]


def _check(name: str, folder: Path | None) -> None:
    """Raises TaskError, at once, for what is neither a folder nor a hub id."""
    if folder is None and not hub.is_id(name):
        raise TaskError(
            f"task.dataset: there is no folder '{name}' (working directory '{Path.cwd()}'), and it is not a hub id (like 'owner/name')"
        )


@contextlib.contextmanager
def _as_reachable(datasets: Any, folder: Path | None) -> Iterator[None]:
    """Tells `datasets` to look no further than its cache where the hub does not answer: it would try for minutes."""
    if folder is not None or hub.reachable():
        yield
        return
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    except ConnectionError as error:
        raise TaskError(
            f"the hub cannot be reached, there is no such folder, and nothing was fetched before ({_first_line(error)}); set task.dataset to "
            "the folder of a local copy, or mend the connection"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _open(datasets: Any, config: TaskConfig, folder: Path | None, subset: str, split: str) -> Any:
    """One split, to be iterated over."""
    if folder is None:
        return datasets.load_dataset(config.dataset, subset or None, split=split, streaming=config.streaming)
    at = folder / subset if subset and (folder / subset).is_dir() else folder
    if any((at / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(at))
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise TaskError(
                f"the data set '{at}' has no split '{split}' (task.split, task.eval_split); it has {', '.join(saved)}"
            )
        return saved[split]
    if not subset:
        return datasets.load_dataset(str(folder), split=split, streaming=True)
    known = datasets.get_dataset_config_names(str(folder))
    if subset in known:
        return datasets.load_dataset(str(folder), subset, split=split, streaming=True)
    if at == folder:
        raise TaskError(
            f"the folder '{folder}' has no subset '{subset}' (task.subset), neither as a folder in it nor as a configuration; it has "
            f"{', '.join(known)}"
        )
    return datasets.load_dataset(str(folder), data_dir=subset, split=split, streaming=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
