"""Checkpoints: Hugging Face folders (of an adapter: peft's) with the optimizer beside, written whole or not at all, checked by hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from respec.errors import CheckpointError, ModelError
from respec.models.adapted import CONFIG as ADAPTER
from respec.models.adapted import is_adapted, load_adapter
from respec.models.load import Policy
from respec.weights.export import save_trained

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_NUMBERS = "optimizer.json"
COUNTERS = "counters.json"
# A step's folder; `.old-` is one being replaced by another of the same step, whole until its successor is in place.
NAME = re.compile(r"(\.old-)?(\d{6,})")
TEMPORARY = ".tmp-"

State = Mapping[str, Any]
"""A tree of dicts with string keys; its leaves are tensors or numbers."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file has the size and hash it was written with. `path` loads with `load_policy` and `from_pretrained`."""

    path: Path
    step: int
    counters: Mapping[str, Any]


def save_checkpoint(
    run_dir: Path, step: int, policy: Policy, learner_state: State, counters: Mapping[str, Any], keep: int
) -> Path:
    """Writes checkpoints/<step>, then removes all but the last `keep`; returns its path.

    `learner_state` is a tree of tensors and numbers, kept bit for bit; `counters` are plain JSON values. Killed at any
    moment, this leaves the checkpoints from before, the new one, or both. Checkpoints of later steps go too: they are of a future
    that was cut off. Raises CheckpointError if the disk refuses, with the earlier checkpoints untouched.
    """
    parent = run_dir / FOLDER
    final, old = parent / f"{step:06d}", parent / f".old-{step:06d}"
    temporary = parent / f"{TEMPORARY}{step:06d}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        _write(temporary, step, policy, learner_state, counters)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        _sync(parent)
        _prune(parent, step, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to '{final}': {error}; those before it are as they were. Make "
            "room on the disk or name another run.dir"
        ) from error
    return final


def latest_checkpoint(run_dir: Path, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there has never been one. Reads every byte of it; changes nothing.

    A damaged one is passed over with a line to `say`. Raises CheckpointError if there are some and all are damaged: beginning
    again without a word would throw the run away.
    """
    candidates = _candidates(run_dir / FOLDER)
    for path, step in candidates:
        try:
            return verify(path, step)
        except CheckpointError as error:
            say(f"{error}; it is passed over")
    if candidates:
        raise CheckpointError(
            f"all {len(candidates)} checkpoints in '{run_dir / FOLDER}' are damaged; put one back from a copy, or delete that "
            "folder to begin the run again"
        )
    return None


def verify(path: Path, step: int) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest. Raises CheckpointError naming the first that differs."""
    files = _manifest(path, step)
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"the checkpoint '{path}' is damaged: {name} is missing")
        if file.stat().st_size != entry["size"]:
            size = file.stat().st_size
            raise CheckpointError(
                f"the checkpoint '{path}' is damaged: {name} has {size} bytes, it was written with {entry['size']}"
            )
        if _sha256(file) != entry["sha256"]:
            raise CheckpointError(f"the checkpoint '{path}' is damaged: the content of {name} has changed")
    return Checkpoint(path, step, json.loads((path / COUNTERS).read_text()))


def load_checkpoint(checkpoint: Checkpoint, policy: Policy) -> dict[str, Any]:
    """Puts the weights into `policy.model`, in place and bit for bit; returns the learner's state as it was saved.

    Raises CheckpointError if the weights are of another model: a name, a shape or a dtype that does not fit, an adapter of another base.
    """
    _load_weights(checkpoint.path, policy)
    return read_state(checkpoint.path)


def read_state(folder: Path) -> dict[str, Any]:
    """The tree that `write_state` wrote into the folder."""
    state: dict[str, Any] = {}
    leaves = {**load_file(folder / OPTIMIZER), **json.loads((folder / OPTIMIZER_NUMBERS).read_text())}
    for key, value in leaves.items():
        *above, last = key.split("/")
        node = state
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return state


def _load_weights(folder: Path, policy: Policy) -> None:
    if (folder / ADAPTER).is_file() != is_adapted(policy.model):
        raise CheckpointError(
            f"the checkpoint '{folder}' is of a run {'without' if is_adapted(policy.model) else 'with'} [policy.lora], the one configured is "
            "not; go on with the configuration that wrote it"
        )
    if is_adapted(policy.model):
        try:
            return load_adapter(policy.model, folder)
        except ModelError as error:
            raise CheckpointError(str(error)) from None
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        saved.update(load_file(file))
    own = policy.model.state_dict()
    # Tied weights are saved once, under one of their names.
    reached = {own[name].data_ptr() for name in saved if name in own}
    odd = [name for name in saved if name not in own or own[name].shape != saved[name].shape]
    odd += [name for name in saved if name in own and own[name].dtype != saved[name].dtype]
    odd += [name for name, weight in own.items() if name not in saved and weight.data_ptr() not in reached]
    if odd:
        raise CheckpointError(
            f"the checkpoint '{folder}' is of another model than the one configured ({len(odd)} weights differ in name, "
            f"shape or dtype, first: {odd[0]})"
        )
    policy.model.load_state_dict(saved, strict=False)
    return None


def _write(folder: Path, step: int, policy: Policy, learner_state: State, counters: Mapping[str, Any]) -> None:
    save_trained(policy, folder)
    write_state(folder, learner_state)
    (folder / COUNTERS).write_text(json.dumps(dict(counters), indent=1) + "\n")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": entries}, indent=1) + "\n")
    for path in [*files, folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)


def write_state(folder: Path, state: State) -> None:
    """Writes a tree of tensors and numbers, bit for bit, into a folder that is there."""
    leaves = _leaves(state)
    tensors = {key: value.detach().contiguous() for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    numbers = {key: value for key, value in leaves.items() if not isinstance(value, torch.Tensor)}
    save_file(tensors, folder / OPTIMIZER)
    (folder / OPTIMIZER_NUMBERS).write_text(json.dumps(numbers, indent=1) + "\n")


def _leaves(node: State, at: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        if not isinstance(key, str) or "/" in key:
            raise TypeError(f"a key of the learner's state must be a string without '/', got {key!r}")
        if isinstance(value, Mapping):
            leaves.update(_leaves(value, f"{at}{key}/"))
        elif isinstance(value, torch.Tensor | int | float):
            leaves[f"{at}{key}"] = value
        else:
            raise TypeError(f"'{at}{key}' of the learner's state is a {type(value).__name__}, not a tensor or a number")
    return leaves


def _candidates(parent: Path) -> list[tuple[Path, int]]:
    """Checkpoints by name, newest first; of one step, the one in place before the one it replaces."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if (match := NAME.fullmatch(path.name)) and path.is_dir():
            found.append((path, int(match.group(2)), match.group(1) is None))
    return [(path, step) for path, step, _ in sorted(found, key=lambda item: item[1:], reverse=True)]


def _manifest(path: Path, step: int) -> dict[str, dict[str, Any]]:
    try:
        tree = json.loads((path / MANIFEST).read_bytes())
        files = {str(name): {"size": int(e["size"]), "sha256": str(e["sha256"])} for name, e in tree["files"].items()}
        complete = {COUNTERS, OPTIMIZER, OPTIMIZER_NUMBERS} <= set(files) and int(tree["step"]) == step
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint '{path}' is damaged: its {MANIFEST} cannot be read ({error!r})"
        ) from None
    if not complete:
        raise CheckpointError(f"the checkpoint '{path}' is damaged: its {MANIFEST} is not that of step {step}")
    return files


def _prune(parent: Path, step: int, keep: int) -> None:
    kept = 0
    for path, its_step in _candidates(parent):
        if its_step <= step and not path.name.startswith(".") and _has_its_sizes(path, its_step) and kept < keep:
            kept += 1
        else:
            # Out of sight first: a half-deleted folder must not be taken for a damaged checkpoint.
            away = parent / f"{TEMPORARY}gone-{path.name}"
            path.rename(away)
            shutil.rmtree(away)


def _has_its_sizes(path: Path, step: int) -> bool:
    """A cheap look, so that a truncated checkpoint does not count as one of those kept."""
    try:
        return all((path / name).stat().st_size == entry["size"] for name, entry in _manifest(path, step).items())
    except (CheckpointError, OSError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
