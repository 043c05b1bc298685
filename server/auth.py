"""Refuses requests without a valid API key, before anything of their body is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forkpoint.configs.errors import RequestError
from forkpoint.server.errors import ErrorReply

# The probes. Beside them only the page's files are open, and /metrics where it is opened.
OPEN_PATHS = frozenset({"/health", "/livez", "/ready", "/readyz"})


class ApiKeyMiddleware:
    """Pure ASGI: BaseHTTPMiddleware would hide the client's disconnect from the handlers."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # OPTIONS: a browser asks for permission before it may send the key, and gets nothing but that.
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths or scope["method"] == "OPTIONS"
        if is_open or self._has_valid_key(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "missing or wrong API key; send `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
        )
        await ErrorReply.of(error).response()(scope, receive, send)

    def _has_valid_key(self, scope: Scope) -> bool:
        # Headers decodes as latin-1, so encoding back gives the client's bytes, whatever they are.
        header = Headers(scope=scope).get("authorization", "").encode("latin-1")
        scheme, _, given = header.partition(b" ")
        # Every key is compared, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
