"""The thread that decodes: requests join it between two rounds, newer weights between two answers; deltas go back to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from respec.models.load import Policy
from respec.serve.asked import Asked
from respec.serve.errors import ApiError, api_error
from respec.types import Delta, Sampling

log = logging.getLogger("respec.serve")


class UnderWay(Protocol):
    """A completion that the engine is drawing."""

    news: deque[Delta]

    @property
    def prompt_tokens(self) -> int: ...


class Drawing(Protocol):
    """The engine, as `text_engine.Engine` is."""

    tokenizer: Any
    max_length: int

    @property
    def version(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def encode(self, prompt: Any, row: int = 0) -> Any: ...
    def submit(
        self, prompt: Any, sampling: Sampling, n: int = 1, seed: int = 0, *, place: int = 0, row: int = 0
    ) -> Sequence[UnderWay]: ...
    def step(self) -> Sequence[UnderWay]: ...
    def cancel(self, completion: Any) -> None: ...
    def renew(self, policy: Policy, version: int) -> None: ...


@dataclass(frozen=True)
class Joined:
    """The first news of a job: the version that will answer it, and how many tokens its prompts have."""

    version: int
    prompt_tokens: int


@dataclass(eq=False)
class Job:
    """One request at the engine. `news` has a `Joined`, then pieces, or an error, which is the last."""

    asked: Asked
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    drawn: list[UnderWay] = field(default_factory=list)
    gone: bool = False

    def tell(self, news: Any) -> None:
        # the loop may have been closed meanwhile: then nobody listens any more
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)


class DecodingThread:
    """Owns the engine. `most_tokens` bounds a completion's new tokens.

    An answer is of one version of the weights from its first token to its last: once newer ones have come, no request joins until those under
    way have been answered.
    """

    def __init__(self, engine: Drawing, most_tokens: int) -> None:
        self._engine, self._most = engine, most_tokens
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._held: list[Job] = []
        self._newer: tuple[Policy, int] | None = None
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self.version = engine.version

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends it after the round it is in; what is under way is not answered."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(self, asked: Asked) -> Job:
        """From the event loop: a request joins before one of the next rounds."""
        job = Job(asked, asyncio.get_running_loop())
        self._inbox.put(lambda: self._held.append(job))
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants its answer any more. Nothing where it has been answered."""
        self._inbox.put(lambda: self._drop(job))

    def renew(self, policy: Policy, version: int) -> None:
        """Newer weights, from any thread; of several the newest are taken."""
        self._inbox.put(lambda: self._offer(policy, version))

    def _offer(self, policy: Policy, version: int) -> None:
        self._newer = (policy, version)

    def _run(self) -> None:
        while True:
            idle = not (self._engine.busy or self._held or self._newer)
            while idle or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    return
                message()
                idle = False
            if self._newer is not None and not self._engine.busy:
                self._swap(*self._newer)
            if self._newer is None:
                held, self._held = self._held, []
                for job in held:
                    self._join(job)
            self._step()

    def _join(self, job: Job) -> None:
        asked, engine = job.asked, self._engine
        if job.gone:
            return
        try:
            for place, prompt in enumerate(asked.prompts):
                encoded = engine.encode(prompt)
                sampling = replace(asked.sampling, max_new_tokens=self._new_tokens(asked, len(encoded.token_ids)))
                made = engine.submit(encoded.token_ids, sampling, asked.n, asked.seed, place=place, row=place)
                job.drawn += made
                self._jobs |= {id(completion): job for completion in made}
        except Exception as error:
            self._fail(job, error)
            return
        prompt_tokens = sum(completion.prompt_tokens for completion in job.drawn[:: asked.n])
        job.tell(Joined(engine.version, prompt_tokens))

    def _new_tokens(self, asked: Asked, prompt: int) -> int:
        """As many as are asked for; else as many as there is room for. Raises ApiError for more than the limit."""
        if asked.max_tokens is not None and asked.max_tokens > self._most:
            raise ApiError(
                400,
                f"at most {self._most} tokens are drawn for a completion here, got {asked.max_tokens}",
                param="max_tokens",
            )
        return asked.max_tokens or max(1, min(self._most, self._engine.max_length - prompt))

    def _step(self) -> None:
        try:
            grown = self._engine.step()
        except Exception as error:  # of the model or the machine, not of one request
            for job in set(self._jobs.values()):
                self._fail(job, error)
            return
        for completion in grown:
            job = self._jobs[id(completion)]
            while completion.news:
                piece = completion.news.popleft()
                if piece.finish is not None:
                    del self._jobs[id(completion)]
                job.tell(piece)

    def _swap(self, policy: Policy, version: int) -> None:
        self._newer = None
        try:
            self._engine.renew(policy, version)
            self.version = version
            log.info("answering with version %d from now on", version)
        except Exception:
            log.exception("the weights of version %d could not be taken; version %d goes on", version, self.version)

    def _drop(self, job: Job) -> None:
        job.gone = True
        for completion in job.drawn:
            self._jobs.pop(id(completion), None)
            self._engine.cancel(completion)
        job.drawn = []

    def _fail(self, job: Job, error: Exception) -> None:
        told = api_error(error)
        if told.status >= 500:
            log.error("a request could not be answered", exc_info=error)
        self._drop(job)
        job.tell(told)
