"""One writer per run folder: a lock file that names its process. The lock of a dead process is taken over."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil

from respec.errors import RunDirError

LOCK_FILE = "lock"
# Start times of one process read at two moments differ by clock rounding only.
SAME_START_S = 2.0


def acquire(run_dir: Path) -> str | None:
    """Takes the folder's lock; returns a line to say if a dead process had left one behind, else None.

    Raises RunDirError while a living process holds it, or one on another machine, of which nothing can be known from here.
    """
    lock = run_dir / LOCK_FILE
    mine = run_dir / f".{LOCK_FILE}.{os.getpid()}"
    owner = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    mine.write_text(json.dumps(owner))
    note = None
    try:
        while True:
            try:
                os.link(mine, lock)  # fails if it is there: the one atomic step
                return note
            except FileExistsError:
                note = _clear(lock, run_dir)
    finally:
        mine.unlink(missing_ok=True)


def release(run_dir: Path) -> None:
    """Gives the lock back, if this process holds it."""
    lock = run_dir / LOCK_FILE
    if _read(lock).get("pid") == os.getpid():
        lock.unlink(missing_ok=True)


def standing(run_dir: Path) -> tuple[str, str]:
    """`free`; `held` by a living process; `dead`, left behind by one that is gone; or locked `elsewhere`: with the host. Takes nothing."""
    if not (run_dir / LOCK_FILE).exists():
        return "free", ""
    owner = _read(run_dir / LOCK_FILE)
    host = str(owner.get("host", ""))
    if owner and host != socket.gethostname():
        return "elsewhere", host
    return ("held" if _alive(owner.get("pid"), owner.get("started")) else "dead"), host


def _clear(lock: Path, run_dir: Path) -> str | None:
    """Removes a dead process's lock. Raises RunDirError if its process lives, or may."""
    owner = _read(lock)
    if owner and owner.get("host") != socket.gethostname():
        raise RunDirError(
            f"the run folder '{run_dir}' was locked on another machine ({owner.get('host')}, process {owner.get('pid')}, since "
            f"{owner.get('since')}); if that process is gone, delete '{lock}' and start again"
        )
    pid = owner.get("pid")
    if owner and _alive(pid, owner.get("started")):
        raise RunDirError(
            f"the run folder '{run_dir}' is in use by process {pid}, since {owner.get('since')}; wait for it, stop it, or give "
            "this run another folder with --set run.dir=..."
        )
    lock.unlink(missing_ok=True)
    return f"the run before (process {pid}) ended without closing its folder; going on from what it saved"


def _read(lock: Path) -> dict:
    try:
        tree = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _alive(pid: object, started: object) -> bool:
    """Whether that very process runs: a number given again to a younger one does not count."""
    try:
        process = psutil.Process(pid)  # type: ignore[arg-type]
        same = isinstance(started, float) and abs(process.create_time() - started) < SAME_START_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, TypeError, ValueError):
        return False
