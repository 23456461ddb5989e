"""The runs in the folders that were given, and nothing outside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from respec.report.run_dir import CONFIG_FILE

DEPTH = 4
MOST_RUNS = 2000


def find(roots: Sequence[Path]) -> dict[str, Path]:
    """Key -> folder of each run: its path below its root, after the root's name where there are several. Links are not followed."""
    found: dict[str, Path] = {}
    for root in roots:
        root = root.resolve()
        for folder in _runs(root, DEPTH):
            below = folder.relative_to(root).as_posix()
            key = root.name if below == "." else below if len(roots) == 1 else f"{root.name}/{below}"
            while key in found and found[key] != folder:
                key += "~"
            found[key] = folder
            if len(found) == MOST_RUNS:
                return found
    return found


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    config = folder / CONFIG_FILE
    if config.is_file():
        if not config.is_symlink():
            yield folder
        return
    if not depth:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # not ours to read, or gone
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _runs(Path(entry.path), depth - 1)
