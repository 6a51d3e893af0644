"""The ASGI application: routes, the guard around all of them, and error objects for whatever goes wrong.

It knows how HTTP requests enter and leave; it does not know what a route does.
"""

from __future__ import annotations

import logging
import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import __version__
from serve.api import routes_generate, routes_server
from serve.api.connections import check_headers
from serve.api.errors import ApiError, ClientGone, install_error_handlers
from serve.api.page import page_router
from serve.api.request_log import RequestRecord, log_request
from serve.api.state import ServerState

log = logging.getLogger("serve.api")

OPEN_PATHS = frozenset({"/health", "/"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(state: ServerState) -> FastAPI:
    """The application of one server. It answers from the start: 503 until ``state.model`` is set."""
    # No documentation pages: they would load scripts from a CDN. The schema itself is served.
    app = FastAPI(title="Foretoken", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    app.include_router(routes_generate.router)
    app.include_router(routes_server.router)
    if state.config.dev_routes:
        app.include_router(routes_server.dev_router)
    if state.config.page:
        app.include_router(page_router(bool(state.keys)))
    install_error_handlers(app)
    app.add_middleware(Guard, state=state)
    return app


class Guard:
    """Around every route: request id, API key, response count, and a 500 error object for what nobody caught.

    Deny by default: with keys set, every path but those in ``OPEN_PATHS`` needs one, known or not.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            # Nothing else is served: a WebSocket, if the HTTP library ever offered one, must not pass by the key.
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        status: int | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            check_headers(scope)
            self._admit(scope, headers)
            await self._app(scope, receive, send_marked)
        except ApiError as error:
            await error.to_response()(scope, receive, send_marked)
        except (ClientGone, ClientDisconnect):
            log.info("request %s: the client left", request_id)
            status = 499
        except Exception:
            log.exception("request %s failed", request_id)
            if status is None:
                failure = ApiError(
                    500, f"the server failed; its log has request id {request_id}", code="internal_error"
                )
                await failure.to_response()(scope, receive, send_marked)
        if status is not None:
            self._state.metrics.responses[str(status)] += 1
            record: RequestRecord | None = scope.get("foretoken.record")
            if record is not None:
                log_request(record, request_id, _route_path(scope), status)
            else:
                log.info("request %s: %s %s %d", request_id, _method(scope), _route_path(scope), status)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        keys = self._state.keys
        if not keys:
            return
        found = keys.match(headers.get("authorization"))
        if found is not None:
            scope["foretoken.key"] = found
        elif scope["path"] not in OPEN_PATHS:
            raise ApiError(
                401,
                "Authorization: a valid API key is needed (Authorization: Bearer ...)",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _method(scope: Scope) -> str:
    """The method for the log, never one that a client made up."""
    return scope["method"] if scope["method"] in _METHODS else "(no method)"


def _route_path(scope: Scope) -> str:
    """The route's own path for the log, never what the client wrote."""
    return str(getattr(scope.get("route"), "path", "(no route)"))
