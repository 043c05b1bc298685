"""The page at `/`: chat, cache and requests. Plain files, no build step; they read public endpoints only."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
_FOLDER = files("forkpoint.server") / "ui"
# By path.
_ASSETS = {
    "/" if each.name == "index.html" else f"/ui/{each.name}": (
        _TYPES[Path(each.name).suffix],
        each.read_bytes(),
    )
    for each in _FOLDER.iterdir()
}
# Nothing from elsewhere, nothing inline, no frames: text of a model or a prompt can never become a script.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

# What is answered without a key: it holds nothing of this server. The page asks for the key by itself.
PAGE_PATHS = frozenset(_ASSETS)


def page_routes() -> APIRouter:
    """GET / and GET /ui/NAME, with an ETag each."""
    router = APIRouter()
    for path, (media_type, content) in _ASSETS.items():
        endpoint = _endpoint(media_type, content)
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    return router


def _endpoint(media_type: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return show
