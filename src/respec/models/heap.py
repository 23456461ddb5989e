"""Gives memory that is free back to the system: glibc keeps it where small pieces that live on lie between big ones that do not."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

# What a process may grow before its free pages are looked for: memory that is given back has to be taken again page by page, which costs
# a step of a small model more than all that its drafter learns.
WORTH = 2**30
# glibc's mallopt: its names, the largest threshold it takes for blocks that it asks of the system one by one, and a threshold that is not reached.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE, NEVER = 2**25, 2**31 - 1


def give_back() -> None:
    """Returns the heap's free pages; nothing happens where the C library is another. Takes milliseconds: for the end of a pass, not of a round."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def kept_heap() -> Iterator[None]:
    """What is freed within stays with the process, so that passes which follow each other lie in the same memory: page by page, taking it from the system
    anew costs a quarter of a second a gigabyte. Also a decorator.

    After it glibc trims as it does by itself once a program has freed a large block: blocks of 32 MiB go back at once, and what is free at the heap's end
    when it is more than 64.
    """
    _tune(M_MMAP_THRESHOLD, LARGE)
    _tune(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        _tune(M_TRIM_THRESHOLD, 2 * LARGE)


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


def _tune(parameter: int, value: int) -> None:
    library = _glibc()
    if library is not None:
        library.mallopt(parameter, value)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
