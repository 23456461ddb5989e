"""What made a run: versions, commit, machine, threads, time. One entry each time the run is started or gone on with."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("respec-rl", "torch", "transformers", "tokenizers", "numpy", "safetensors", "reasoning-gym")


def provenance(threads: int) -> dict[str, Any]:
    """Facts about this start of a run, as plain JSON values."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": commit(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "threads": threads,
    }


def usable_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        return os.cpu_count() or 1


def commit() -> str | None:
    """The commit of respec's own source tree, `+changes` if it has any; None when it was installed without one."""
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src" / "respec" != package:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", str(package))
    head = _git(package, "rev-parse", "HEAD")
    return f"{head}{'+changes' if changed else ''}" if head else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
