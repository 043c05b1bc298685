"""Gives every request an id (x-request-id, the client's if it is sane), and a 500 to what nobody caught."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkpoint.server.errors import ErrorReply

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = structlog.stdlib.get_logger(__name__)


def request_id_of(scope: Scope) -> str:
    """The id of a request that came through RequestIdMiddleware."""
    request_id: str = scope["state"]["request_id"]
    return request_id


class RequestIdMiddleware:
    """Outermost middleware: the id is in every response, and in every log line of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None
        begin = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                _log.exception("request failed", path=scope["path"])
                if status is None:
                    await ErrorReply.of(error).response()(scope, receive, send_with_id)
            _log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                duration_s=round(time.monotonic() - begin, 4),
            )
