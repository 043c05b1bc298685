"""/v1/models and /v1/models/{id}: the names under which the one model is served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from forkpoint.server.generation_fields import unknown_model
from forkpoint.server.services import Services


def models_routes(services: Services) -> APIRouter:
    """Both answer 503 until the engine was ready once: max_model_len is not known before."""
    router = APIRouter()

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": services.created,
            "owned_by": "forkpoint",
            "max_model_len": services.engine_info.context_length,
        }

    async def list_models() -> Response:
        names = services.config.served_model_names
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    async def get_model(model_id: str) -> Response:
        if model_id not in services.config.served_model_names:
            raise unknown_model(model_id)
        return JSONResponse(card(model_id))

    router.add_api_route("/v1/models", list_models, methods=["GET", "HEAD"], response_model=None)
    # `path`: ids of the hub have slashes, and the server has decoded %2F before routing.
    router.add_api_route(
        "/v1/models/{model_id:path}", get_model, methods=["GET", "HEAD"], response_model=None
    )
    return router
