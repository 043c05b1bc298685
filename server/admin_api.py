"""What operators call: /metrics, /version, and /flush_cache (/reset_prefix_cache)."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from forkpoint.configs.errors import RequestError
from forkpoint.server.services import Services


def admin_routes(services: Services) -> APIRouter:
    router = APIRouter()

    async def metrics() -> Response:
        return Response(generate_latest(services.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_version() -> Response:
        return JSONResponse({"version": version("forkpoint")})

    async def flush_cache() -> Response:
        services.lifecycle.require_serving()
        if not await services.engine.flush_cache():
            raise RequestError(
                "the cache is in use by running or waiting requests; flush it when they are done",
                status=409,
                code="cache_in_use",
            )
        return JSONResponse({"success": True})

    router.add_api_route("/metrics", metrics, methods=["GET", "HEAD"], response_model=None)
    router.add_api_route("/version", show_version, methods=["GET", "HEAD"], response_model=None)
    for path in ("/flush_cache", "/reset_prefix_cache"):
        router.add_api_route(path, flush_cache, methods=["POST"], response_model=None)
    return router
