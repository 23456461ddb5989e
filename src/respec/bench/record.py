"""What every recorded measurement keeps to: it names the code, the machine and the versions, or it is not written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from respec.errors import ConfigError
from respec.report.provenance import provenance


def write_result(out: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """Adds where and with what it was measured, and writes it as JSON when `out` is given."""
    whole = result | {"provenance": provenance(torch.get_num_threads())}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(whole, indent=2) + "\n")
    return whole


def refuse_dirty() -> None:
    """Raises ConfigError outside a git tree or in one with uncommitted changes: a result must name the code it measured."""
    try:
        done = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            "--out records the commit that was measured, but this is not a git tree; leave --out away"
        ) from None
    if done.stdout.strip():
        raise ConfigError(
            "--out refuses a tree with uncommitted changes: commit first, so that the result names the code it measured"
        )
