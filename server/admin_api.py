"""What operators call: /metrics, /version, /server_info, /flush_cache and /abort_request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkpoint.configs.errors import RequestError
from forkpoint.server.aborts import RunningRequests
from forkpoint.server.errors import ErrorReply
from forkpoint.server.fields import Fields
from forkpoint.server.services import Services

MAX_ABORTED_IDS = 1024


def admin_routes(services: Services, running: RunningRequests) -> APIRouter:
    router = APIRouter()

    async def metrics() -> Response:
        return Response(generate_latest(services.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_version() -> Response:
        return JSONResponse({"version": version("forkpoint")})

    async def show_server() -> Response:
        return JSONResponse(_server_info(services))

    async def flush_cache() -> Response:
        services.lifecycle.require_serving()
        if not await services.engine.flush_cache():
            raise RequestError(
                "the cache is in use by running or waiting requests; flush it when they are done",
                status=409,
                code="cache_in_use",
            )
        return JSONResponse({"success": True})

    async def abort_request(request: Request) -> Response:
        body = await services.bodies.read(request.scope, request.receive)
        num_aborted = sum(map(running.abort, _request_ids(body)))
        return JSONResponse({"success": True, "num_aborted": num_aborted})

    async def refuse_embeddings() -> Response:
        # The official client would try a 5xx again twice.
        reply = ErrorReply(
            status=501,
            message="this server generates text; it has no embedding model",
            type="invalid_request_error",
            code="not_supported",
            headers={"x-should-retry": "false"},
        )
        return reply.response()

    for path, endpoint in (
        ("/metrics", metrics),
        ("/version", show_version),
        ("/server_info", show_server),
        ("/get_server_info", show_server),
    ):
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    for path, endpoint in (("/flush_cache", flush_cache), ("/reset_prefix_cache", flush_cache)):
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path in ("/abort_request", "/abort_requests"):
        router.add_api_route(path, abort_request, methods=["POST"], response_model=None)
    router.add_api_route("/v1/embeddings", refuse_embeddings, methods=["POST"], response_model=None)
    return router


def _server_info(services: Services) -> dict[str, object]:
    """What is served and how; nothing secret. Raises EngineLoading until the engine was ready once."""
    config = services.config
    return {
        "version": version("forkpoint"),
        "created": services.created,
        "served_model_names": list(config.served_model_names),
        "has_chat_template": services.template is not None,
        "max_queued_requests": config.max_queued_requests,
        "sampling_defaults": asdict(config.sampling_defaults),
        **asdict(services.engine_info),
    }


def _request_ids(body: Mapping[str, object]) -> list[str]:
    """The ids to abort: `request_id` or SGLang's `rid`, or vLLM's list `request_ids`. Raises RequestError."""
    fields = Fields(body)
    ids = fields.get("request_ids")
    singles = [fields.string(name) for name in ("request_id", "rid")]
    if ids is None:
        ids = [single for single in singles if single is not None][:1]
        if not ids:
            raise RequestError("give `request_id`, the x-request-id of a running request", param="request_id")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise fields.error("request_ids", "must be a list of strings")
    if len(ids) > MAX_ABORTED_IDS:
        raise fields.error("request_ids", f"has {len(ids)} ids; at most {MAX_ABORTED_IDS} are allowed")
    return ids
