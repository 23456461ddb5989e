"""The ASGI application: who may ask, how much at once, and the way of a request from its body to its answer."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from respec.serve.answers import Answer, event
from respec.serve.asked import Kind, read, refuse_another
from respec.serve.decoding import DecodingThread, Job, Joined
from respec.serve.errors import ApiError, api_error, busy

VERSION_HEADER = "x-respec-version"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ENDPOINTS = ("GET /v1/models", "POST /v1/chat/completions", "POST /v1/completions", "GET /health")


@dataclass(frozen=True)
class Limits:
    """What is taken on. `requests` and `completions` are under way at once, those that wait for a place included; `body` is in bytes,
    `tokens` the new ones of a completion."""

    requests: int = 64
    completions: int = 256
    body: int = 4 * 2**20
    tokens: int = 2048


class Service:
    """One served model. `key`: what clients must show; none is for loopback only, where requests must be addressed to it by name."""

    def __init__(
        self, decoding: DecodingThread, tokenizer: Any, name: str, created: int, limits: Limits, key: str | None
    ) -> None:
        self._decoding, self._tokenizer, self._name, self._created = decoding, tokenizer, name, created
        self._limits, self._key = limits, key
        self._requests = self._completions = 0

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
        ]
        handlers = {ApiError: _answer_error, HTTPException: _answer_http, Exception: _answer_error}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self._decoding.start()
        yield
        # a round may take long: the loop goes on meanwhile
        await asyncio.to_thread(self._decoding.stop)

    async def _health(self, request: Request) -> Response:
        well = self._decoding.alive
        said = {"status": "ok" if well else "failed", "model": self._name, "version": self._decoding.version}
        return JSONResponse(said | {"requests": self._requests}, 200 if well else 503)

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        refuse_another([request.path_params["name"]], self._name)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name, "object": "model", "created": self._created, "owned_by": "respec", "version": self._decoding.version,
            "max_tokens": self._limits.tokens,
        }  # fmt: skip

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, "chat")

    async def _text(self, request: Request) -> Response:
        return await self._complete(request, "text")

    async def _complete(self, request: Request, kind: Kind) -> Response:
        self._admit(request)
        asked = read(await self._body(request), kind)
        refuse_another([asked.model], self._name)
        if asked.completions > self._limits.completions:
            raise ApiError(
                400,
                f"at most {self._limits.completions} completions are drawn for a request, got {asked.completions}",
                param="n",
            )
        if self._requests >= self._limits.requests or self._completions + asked.completions > self._limits.completions:
            raise busy(
                f"{self._requests} requests of {self._completions} completions are under way; send it again in a moment"
            )
        return _Completing(self, request, self._decoding.ask(asked), self._tokenizer)

    def _admit(self, request: Request) -> None:
        """Raises ApiError for one without the key; where there is no key, for one that a page of another site had a browser send here."""
        if self._key is not None:
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(shown.encode(), self._key.encode()):
                raise ApiError(
                    401,
                    "the key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    "authentication_error",
                    code="invalid_api_key",
                )
        elif request.url.hostname not in LOOPBACK:
            raise ApiError(
                403,
                f"requests must be addressed to {', '.join(LOOPBACK)}, got '{request.url.hostname}'",
                "permission_error",
            )

    async def _body(self, request: Request) -> bytes:
        """Raises ApiError for one that is too large, or is not sent as JSON, which a page of another site could do unasked."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the request's content type must be application/json")
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > self._limits.body:
                raise ApiError(413, f"the request's body has more than {self._limits.body} bytes")
        return bytes(raw)

    @contextlib.contextmanager
    def counted(self, job: Job):
        """While it is under way it counts; whatever ends it, the engine draws no more for it."""
        self._requests += 1
        self._completions += job.asked.completions
        try:
            yield
        finally:
            self._requests -= 1
            self._completions -= job.asked.completions
            self._decoding.cancel(job)


class _Completing(Response):
    """A job's answer, whole or as it comes. A client that goes away cancels it."""

    def __init__(self, service: Service, request: Request, job: Job, tokenizer: Any) -> None:
        super().__init__()
        self._service, self._request, self._job, self._tokenizer = service, request, job, tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.counted(self._job):
            answering = asyncio.ensure_future(self._answer(scope, receive, send))
            leaving = asyncio.ensure_future(_gone(self._request))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (answering, leaving):
                    task.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._job.news.get()
        if not isinstance(first, Joined):
            return await api_error(first).response()(scope, receive, send)
        answer = Answer(self._job.asked, first, self._tokenizer)
        headers = {VERSION_HEADER: str(first.version)}
        if self._job.asked.stream:
            return await self._stream(answer, headers, send)
        while not answer.done:
            news = await self._job.news.get()
            if isinstance(news, ApiError):
                return await news.response()(scope, receive, send)
            answer.take(news)
        return await JSONResponse(answer.whole(), headers=headers)(scope, receive, send)

    async def _stream(self, answer: Answer, headers: dict[str, str], send: Send) -> None:
        head = Response(headers={"cache-control": "no-store", **headers}, media_type="text/event-stream").raw_headers
        without_length = [(name, value) for name, value in head if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": without_length})
        part = answer.opening()
        while True:
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if answer.done:
                break
            news = await self._job.news.get()
            if isinstance(news, ApiError):
                await send({"type": "http.response.body", "body": event(news.body), "more_body": False})
                return
            part = answer.take(news)
        await send({"type": "http.response.body", "body": answer.closing(), "more_body": False})


async def _gone(request: Request) -> None:
    """Returns when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        """There is nothing else to be heard."""


async def _answer_error(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _answer_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    there = f"; here are {', '.join(ENDPOINTS)}" if status in (404, 405) else ""
    return ApiError(status, f"{request.method} {request.url.path}: {error}{there}").response()
