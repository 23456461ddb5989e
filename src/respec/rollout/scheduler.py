"""Continuous batching: a finished sequence leaves at once, a waiting one takes its slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from respec.rollout.kv_cache import KVCache
from respec.rollout.request import NO_SLOT, Request
from respec.types import Load, Sampling, Version


class Scheduler:
    """Requests wait in order of arrival and are active while they hold a slot of the cache."""

    def __init__(self, requests: Iterable[Request], cache: KVCache, max_batch: int) -> None:
        self.waiting = deque(requests)
        self.active: list[Request] = []
        self._cache = cache
        self._max_batch = max_batch

    @property
    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.active) < self._max_batch and self._cache.can_allocate

    def admit(self, version: int) -> Request:
        """Moves the longest-waiting request into the batch."""
        request = self.waiting.popleft()
        request.slot = self._cache.allocate(version)
        self.active.append(request)
        return request

    def retire(self) -> list[Request]:
        """Takes out what has finished and gives its slots back."""
        done = [request for request in self.active if request.finish is not None]
        for request in done:
            self._cache.release(request.slot)
            request.slot = NO_SLOT
        self.active = [request for request in self.active if request.finish is None]
        return done

    def remove(self, request: Request) -> bool:
        """Takes out one that has not finished, and says whether it was there."""
        if any(request is other for other in self.active):
            self.active = [other for other in self.active if other is not request]
            self._cache.release(request.slot)
            request.slot = NO_SLOT
            return True
        kept = deque(other for other in self.waiting if other is not request)
        was_there = len(kept) < len(self.waiting)
        self.waiting = kept
        return was_there

    def load(self, sampling: Sampling, version: int) -> Load:
        """What the coming round carries, under weights of this version."""
        active = self.active
        return Load(
            active=len(active), waiting=len(self.waiting), context=float(np.mean([request.length for request in active])),
            remaining_B=tuple(request.remaining(sampling) for request in active), version=Version(version),
            row_B=tuple(request.ask.prompt.row for request in active), drawn_B=tuple(len(request.tokens) for request in active),
        )  # fmt: skip
