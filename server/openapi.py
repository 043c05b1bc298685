"""/openapi.json: the schema of all routes, of what they read and what they answer.

Kept by hand, since bodies are validated by hand; ranges and limits come from the constants that validate.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from forkpoint.server.auth import OPEN_PATHS
from forkpoint.server.cache_view import DEFAULT_NODES, MAX_NODES
from forkpoint.server.live_view import MAX_STEP_NUMBER
from forkpoint.server.openapi_answers import answer_schemas
from forkpoint.server.openapi_requests import Schema, request_schemas

_JSON = "application/json"
_TEXT = "text/plain"
_EVENTS = "text/event-stream"


def openapi_routes() -> APIRouter:
    router = APIRouter()
    document = orjson.dumps(openapi_document())

    async def show_schema() -> Response:
        return Response(document, media_type=_JSON)

    router.add_api_route("/openapi.json", show_schema, methods=["GET", "HEAD"], response_model=None)
    return router


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forkpoint", "version": version("forkpoint")},
        "paths": _paths(),
        "components": {
            "schemas": {**request_schemas(), **answer_schemas()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Schema]:
    paths = {
        "/v1/chat/completions": _post(
            "Answer a chat", "ChatCompletionRequest", "ChatCompletion", stream="ChatCompletionChunk"
        ),
        "/v1/completions": _post(
            "Continue a text", "CompletionRequest", "Completion", stream="CompletionChunk"
        ),
        "/v1/responses": _post(
            "Answer a chat, as OpenAI's Responses API without state", "Object", "Object", stream="Object"
        ),
        "/v1/models": _get("The names of the model", "ModelList", 503),
        "/v1/models/{model_id}": {
            **_get("One name of the model", "Model", 404, 503),
            "parameters": [
                {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
        },
        "/v1/embeddings": {"post": _operation("Not served", {}, 501)},
        "/debug/cache": {
            **_get("What the prefix cache holds", "Object", 400, 503),
            "parameters": [
                {
                    "name": "max_nodes",
                    "in": "query",
                    "schema": {
                        "type": "integer", "minimum": 1, "maximum": MAX_NODES, "default": DEFAULT_NODES
                    },
                }
            ],
        },
        "/debug/steps": {
            **_get("The latest steps, gauges and counters", "Object", 400),
            "parameters": [
                {
                    "name": "after",
                    "in": "query",
                    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_STEP_NUMBER, "default": 0},
                }
            ],
        },
        "/debug/requests": _get("The generation requests under way", "Object"),
        "/metrics": {"get": _operation("Prometheus metrics", {_TEXT: {"schema": {"type": "string"}}})},
        "/version": _get("The version of the server", "Version"),
        "/openapi.json": _get("This document", "Object"),
    }  # fmt: skip
    for path in ("/server_info", "/get_server_info"):
        paths[path] = _get("What is served, and how", "Object", 503)
    for prefix in ("", "/v1"):
        paths[f"{prefix}/tokenize"] = _post("Token ids of a prompt or a chat", "TokenizeRequest", "Tokens")
        paths[f"{prefix}/detokenize"] = _post("Text of token ids", "DetokenizeRequest", "Text")
    for path in ("/flush_cache", "/reset_prefix_cache"):
        paths[path] = {"post": _operation("Empty the prefix cache", _content("Success"), 409, 503)}
    for path in ("/abort_request", "/abort_requests"):
        paths[path] = _post("End running requests", "AbortRequest", "Aborted")
    for path in ("/livez", "/ready", "/readyz", "/health"):
        paths[path] = _get("Probe", "Status", *([] if path == "/livez" else [503]))
    for path, item in paths.items():
        if path not in OPEN_PATHS:
            for operation in (item[method] for method in ("get", "post") if method in item):
                operation["security"] = [{}, {"key": []}]  # if the server was given keys
                operation["responses"]["401"] = _error("401")
    return paths


def _get(summary: str, answer: str, *errors: int) -> Schema:
    return {"get": _operation(summary, _content(answer), *errors)}


def _post(summary: str, body: str, answer: str, *, stream: str | None = None) -> Schema:
    content = _content(answer)
    errors = [400, 404, 408, 413, 415, 429, 500, 503]
    if stream is not None:
        about = "With `stream: true`; of each event. The last one's is `[DONE]`."
        of_event = {"contentMediaType": _JSON, "contentSchema": _ref(stream)}
        event = {"type": "string", "description": about, "anyOf": [{"const": "[DONE]"}, of_event]}
        content[_EVENTS] = {"schema": {"type": "object", "properties": {"data": event}, "required": ["data"]}}
    operation = _operation(summary, content, *errors)
    operation["requestBody"] = {"required": True, "content": _content(body)}
    return {"post": operation}


def _operation(summary: str, content: Schema, *errors: int) -> Schema:
    responses: Schema = {"200": {"description": "Done", "content": content}} if content else {}
    return {
        "summary": summary,
        "responses": responses | {str(status): _error(str(status)) for status in errors},
    }


def _error(status: str) -> Schema:
    return {"description": _MEANING[status], "content": _content("Error")}


def _content(name: str) -> Schema:
    return {_JSON: {"schema": _ref(name)}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_MEANING = {
    "400": "A field is wrong, or the prompt does not fit",
    "401": "No valid key",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "409": "The cache is in use",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "The queue is full; see Retry-After",
    "500": "The request could not be finished",
    "501": "Not served",
    "503": "Loading, draining, or the engine is restarted; see Retry-After",
}
