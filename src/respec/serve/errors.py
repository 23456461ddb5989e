"""Errors as clients of the API know them: a status, and a body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import JSONResponse

from respec.errors import RespecError


@dataclass
class ApiError(Exception):
    """What a request is refused with. `param` is the field of the request that was wrong."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, dict(self.headers))


def wrong(message: str, param: str | None = None) -> ApiError:
    """A request that can never be answered as it is."""
    return ApiError(400, message, param=param)


def busy(message: str) -> ApiError:
    """A request to be sent again: clients wait for as long as `Retry-After` says."""
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error: its own fault, or that something is wrong here, of which it learns no more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RespecError):
        return wrong(str(error))
    return ApiError(500, "the server failed to answer this request; its log says why", "server_error")
