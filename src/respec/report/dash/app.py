"""The live page's server: pages, their scripts, and the runs as JSON. It answers GET alone, and browsers that came by a name of this machine."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from functools import lru_cache, partial
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from respec.errors import RunDirError
from respec.report import html as page
from respec.report.dash.runs import Runs

# A page of elsewhere whose name was made to mean this machine would send its own name.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
# Plotly writes its own style elements, hence the inline styles.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)
# What is served by name, and as what; nothing else is.
STATIC = {
    "plotly.js": "text/javascript",
    "page.css": "text/css",
    "page_base.js": "text/javascript",
    "page.js": "text/javascript",
    "dash/dash.css": "text/css",
    "dash/dash.js": "text/javascript",
    "dash/live.js": "text/javascript",
}
HTML = "text/html; charset=utf-8"


def make_app(runs: Runs) -> Starlette:
    """The application over `runs`."""
    return Starlette(
        routes=[
            Route("/", _overview, methods=["GET"]),
            Route("/run/{key:path}", partial(_run, runs), methods=["GET"]),
            Route("/api/runs", partial(_rows, runs), methods=["GET"]),
            Route("/api/compare", partial(_compare, runs), methods=["GET"]),
            Route("/api/run/{key:path}", partial(_report, runs), methods=["GET"]),
            Route("/static/{name:path}", _static, methods=["GET"]),
        ],
        middleware=[Middleware(Guard), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5)],
    )


class Guard:
    """Refuses requests that were sent to another name than this machine's own; puts the headers on every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS]
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _name(hosts[0]) not in HOSTS:
            refusal = PlainTextResponse(f"this server answers to {', '.join(HOSTS)} alone\n", status_code=421)
            await refusal(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


def _name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


async def _overview(request: Request) -> Response:
    return Response(page.part("dash/dash.html"), media_type=HTML)


async def _run(runs: Runs, request: Request) -> Response:
    key = request.path_params["key"]
    if not await run_in_threadpool(runs.__contains__, key):
        return PlainTextResponse("there is no such run here\n", status_code=404)
    scripts = ("plotly.js", *page.SCRIPTS, "dash/live.js")
    text = page.filled(
        title=html.escape(f"{key} · respec"),
        head="\n".join(f'<link rel="stylesheet" href="/static/{name}">' for name in ("page.css", "dash/dash.css"))
        + f'\n<meta name="respec-data" content="/api/run/{quote(key)}">',
        brand='<a href="/">‹ respec: all runs</a> <span id="fresh" role="status"></span>',
        scripts="\n".join(f'<script src="/static/{name}"></script>' for name in scripts),
    )
    return Response(text, media_type=HTML)


async def _rows(runs: Runs, request: Request) -> Response:
    return _unless_known(request, await run_in_threadpool(runs.rows))


async def _report(runs: Runs, request: Request) -> Response:
    try:
        body = await run_in_threadpool(runs.report, request.path_params["key"])
    except (RunDirError, OSError) as error:
        return PlainTextResponse(f"{error}\n", status_code=503)
    if body is None:
        return PlainTextResponse("there is no such run here\n", status_code=404)
    return _unless_known(request, body)


async def _compare(runs: Runs, request: Request) -> Response:
    keys, names = (request.query_params.getlist(name) for name in ("run", "metric"))
    return _unless_known(request, await run_in_threadpool(runs.compare, keys, names))


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return PlainTextResponse("there is no such file\n", status_code=404)
    return _unless_known(request, await run_in_threadpool(_file, name), STATIC[name])


@lru_cache(maxsize=len(STATIC))
def _file(name: str) -> bytes:
    return (page.plotly() if name == "plotly.js" else page.part(name)).encode()


def _unless_known(request: Request, body: bytes, kind: str = "application/json") -> Response:
    """The body, or 304 for who has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    known: Sequence[str] = [
        item.strip().removeprefix("W/") for item in request.headers.get("if-none-match", "").split(",")
    ]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=kind, headers=headers)
