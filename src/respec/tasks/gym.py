"""reasoning-gym's datasets by name and parameters. Runs in the worker process, with Python's string hashing fixed:
several datasets walk through sets, and would otherwise give other rows in every process."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from respec.errors import TaskError

_RESERVED = {"seed": "task.seed", "size": "task.train_size and task.eval_size"}


def open_dataset(name: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    """The dataset `name` with `params`. Raises TaskError for an unknown name or parameter, or a refused value."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=3, cutoff=0.5)
        hint = "did you mean " + ", ".join(f"'{item}'" for item in near) + "?" if near else "see its gallery for names"
        raise TaskError(f"task.dataset: reasoning-gym has no dataset '{name}'; {hint}")
    dataset_class, config_class = DATASETS[name]
    known = [item.name for item in dataclasses.fields(config_class) if item.init]
    for key in params:
        if key in _RESERVED:
            raise TaskError(f"task.params.{key} is not for the configuration to set; use {_RESERVED[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "it has " + ", ".join(set(known) - _RESERVED.keys())
            raise TaskError(f"task.params.{key}: reasoning-gym's '{name}' has no such parameter; {hint}")
    try:
        values = {**params, "seed": seed, "size": size}
        if name == "composite":
            values["datasets"] = [DatasetSpec(**{"config": {}, **spec}) for spec in params.get("datasets", ())]
        config = config_class(**values)
        if hasattr(config, "validate"):
            config.validate()
        return dataset_class(config=config)
    except Exception as error:
        raise TaskError(
            f"task.params: reasoning-gym's '{name}' refuses {dict(params)}: {_said(error)}; it takes "
            + ", ".join(item for item in known if item not in _RESERVED)
        ) from error


def make_rows(dataset: Any, start: int, stop: int) -> list[dict[str, Any]]:
    """Rows start..stop-1, each with `question`, `answer` and `metadata`. Raises TaskError if one cannot be made."""
    try:
        entries = [dataset[index] for index in range(start, stop)]
    except Exception as error:
        raise TaskError(
            f"reasoning-gym failed to make a row with these task.params: {_said(error)}; change them"
        ) from error
    return [{key: entry[key] for key in ("question", "answer", "metadata")} for entry in entries]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
