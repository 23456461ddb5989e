"""Gives memory that is free back to the system: glibc keeps it where small pieces that live on lie between big ones that do not."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Returns the heap's free pages; nothing happens where the C library is another. Takes milliseconds: for the end of a pass, not of a round."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
