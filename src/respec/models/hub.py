"""Whether something can be had from the Hugging Face hub, found out in seconds: its clients try a hub that is not there for minutes."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import get_session

_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_PATIENCE_S = 5.0


def is_id(name: str) -> bool:
    """Whether a name could be a hub id, like 'owner/name', and does not look like a path."""
    return bool(_ID.fullmatch(name)) and ".." not in name


def folder(name: str) -> Path | None:
    """The local folder that a name stands for, or None."""
    path = Path(name).expanduser()
    return path if path.is_dir() else None


@functools.cache
def reachable() -> bool:
    """Whether the hub answers, asked once a process. False under HF_HUB_OFFLINE; what was fetched before can be used all the same."""
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # every way of not getting there, of whichever HTTP client is underneath
        return False
    return True
