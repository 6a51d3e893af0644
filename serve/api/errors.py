"""The one error shape of the API: OpenAI's error object, and the exception that carries it.

It knows status codes and wording; it does not know routes, the engine, or which field was wrong and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass
class ApiError(Exception):
    """Ends a request with ``status`` and an error object. ``message`` must name the field and its limit.

    ``param`` is the path of the field (``messages[2].content``), None when no single field is at fault.
    ``message`` never quotes text of the client: it may end in a log.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        return JSONResponse(self.to_json(), self.status, dict(self.headers))


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 whose message begins with the field it is about."""
    return ApiError(400, message if param is None else f"{param}: {message}", param, code)


def unavailable(message: str) -> ApiError:
    """A 503: the same request may work later."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


class ClientGone(Exception):
    """The client hung up: nobody reads an answer, so none is written."""


def install_error_handlers(app: FastAPI) -> None:
    """Make every refusal of the app, its router's 404 and 405 included, an error object."""

    async def on_api_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.to_response()

    async def on_http_exception(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            message, code = "no such route; the routes are listed in /openapi.json", "unknown_url"
        elif error.status_code == 405:
            message, code = "this method is not allowed here; see Allow", "method_not_allowed"
        else:
            message, code = str(error.detail), "http_error"
        return ApiError(error.status_code, message, code=code, headers=error.headers or {}).to_response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
