"""The probes: /livez, /ready (/readyz) and /health. None of them waits for the engine or needs the key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from forkpoint.server.lifecycle import Lifecycle


def health_routes(lifecycle: Lifecycle) -> APIRouter:
    """livez: the process lives. ready: a request would be served now. health: and no step is stuck.

    Where it is not so, ready and health answer 503 with the error envelope and Retry-After.
    """
    router = APIRouter()

    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        lifecycle.require_serving()
        return JSONResponse({"status": "ok"})

    async def health() -> Response:
        lifecycle.require_healthy()
        return JSONResponse({"status": "ok"})

    for path, endpoint in (("/livez", livez), ("/ready", ready), ("/readyz", ready), ("/health", health)):
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    return router
