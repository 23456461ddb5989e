"""Work that goes on beside the next generation: in a thread with processor threads of its own, on a GPU on a stream of its own.

A thread rather than a process: PyTorch's operations let go of Python's lock while they run, and neither the head nor what it learns from
has to be copied. `torch.set_num_threads` holds for the Python thread that calls it, and becomes what others take at their first operation.

While the work is under way the thread that generates leaves it its processor threads: parallel regions end when their last thread does, and one
without a core of its own keeps all the others waiting. (Work at the system's lowest priority was worse: it kept Python's lock while it waited.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Beside:
    """A thread that does one piece of work at a time, with `threads` processor threads."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self._own, self._threads = torch.get_num_threads(), threads
        self._work: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, "drafter")
        self._pool.submit(_take_threads, threads).result()
        # threads that begin later, of whatever library, take the run's number
        torch.set_num_threads(self._own)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begins the work; `result()` waits for it and raises what it raised. What it reads must be left alone, and alive, until then."""
        stream = self._stream
        if stream is None:
            self._work = done = self._pool.submit(work)
            torch.set_num_threads(max(1, self._own - self._threads))
            return done
        stream.wait_stream(torch.cuda.current_stream(stream.device))

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                done = work()
            stream.synchronize()
            return done

        return self._pool.submit(on_stream)

    def share(self) -> None:
        """Takes the processor threads back that work had which has ended: for the thread that generates, between two rounds."""
        if self._work is not None and self._work.done():
            self._work = None
            torch.set_num_threads(self._own)


def _take_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    # asking counts as this thread's first operation: it will not take the default that is set next
    torch.get_num_threads()
