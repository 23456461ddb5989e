"""Gives memory that is free back to the system: glibc keeps it where small pieces that live on lie between big ones that do not."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import psutil

# What a process may grow before its free pages are looked for: memory that is given back has to be taken again page by page, which costs
# a step of a small model more than all that its drafter learns.
WORTH = 2**30


def give_back() -> None:
    """Returns the heap's free pages; nothing happens where the C library is another. Takes milliseconds: for the end of a pass, not of a round."""
    trim = _trim()
    if trim is not None:
        trim(0)


class Growth:
    """Gives memory back where the process stands `worth` bytes above the end of the first step, which had all there is to a step, or above what
    was left when memory was last given back."""

    def __init__(self, worth: int = WORTH) -> None:
        self._worth = worth
        self._bound: int | None = None

    def give_back(self) -> bool:
        """For the end of a step: true where memory was given back. Microseconds where it was not."""
        resident = psutil.Process().memory_info().rss
        if self._bound is None:
            self._bound = resident + self._worth
        if resident < self._bound:
            return False
        give_back()
        self._bound = max(self._bound, psutil.Process().memory_info().rss + self._worth)
        return True


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
