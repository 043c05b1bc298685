"""The schema at /openapi.json says what the server does: routes, fields, bounds, answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute
from support.fake_engine import FakeEngine, says
from support.http_server import World, events_of, serving
from support.text_doubles import EOS, ByteTokenizer, TagTemplate

from forkpoint.configs.serving import ServerConfig
from forkpoint.server.app import create_app
from forkpoint.server.openapi import openapi_document
from forkpoint.server.request_body import BodyReader

PATH_OF = {
    "ChatCompletionRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "TokenizeChatRequest": "/tokenize",
    "TokenizePromptRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
    "AbortRequest": "/abort_request",
}
VALID: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3},
    "CompletionRequest": {"prompt": "hi", "max_completion_tokens": 3},
    "TokenizeChatRequest": {"messages": [{"role": "user", "content": "hi"}]},
    "TokenizePromptRequest": {"prompt": "hi"},
    "DetokenizeRequest": {"tokens": [104]},
    "AbortRequest": {"request_id": "nobody"},
}
# What a field needs beside it.
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "continue_final_message": {"add_generation_prompt": False},
}
SCHEMAS = openapi_document()["components"]["schemas"]
FIELDS = [(name, field) for name in PATH_OF for field in SCHEMAS[name]["properties"]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving(FakeEngine(reply=says("A text, and 🦊.", EOS))) as world:
        yield world


def test_every_route_is_described_and_nothing_else(world: World) -> None:
    document = world.http.get("/openapi.json").json()
    app = create_app(ServerConfig(("m",), has_page=False), FakeEngine(), ByteTokenizer(), TagTemplate())
    described = {
        (path.replace("{model_id}", "{model_id:path}"), method.upper())
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert described == set(_routes(app))


def _routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    def inside(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
        for route in routes:
            router = getattr(route, "original_router", None)
            if router is not None:
                yield from inside(router.routes)
            elif (methods := getattr(route, "methods", None)) is not None:
                path: str = route.path  # type: ignore[attr-defined]
                yield from ((path, method) for method in methods if method not in ("HEAD", "OPTIONS"))

    return inside(app.routes)


class _WatchedBody(dict[str, object]):
    """Remembers which keys it was asked for."""

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", ["ChatCompletionRequest", "CompletionRequest"])
def test_every_field_that_is_read_is_described_or_refused_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bodies: list[_WatchedBody] = []
    read = BodyReader.read

    async def read_watched(self: BodyReader, *arguments: Any) -> dict[str, object]:
        bodies.append(_WatchedBody(await read(self, *arguments)))
        return bodies[-1]

    monkeypatch.setattr(BodyReader, "read", read_watched)
    assert world.http.post(PATH_OF[name], json=VALID[name]).status_code == 200
    monkeypatch.undo()
    undescribed = bodies[0].asked - set(SCHEMAS[name]["properties"])
    assert len(bodies[0].asked) > 20
    for field in undescribed:
        assert field in world.refused(PATH_OF[name], {**VALID[name], field: {"x": 1}})["message"]


def _valid_beside(name: str, field: str) -> dict[str, Any]:
    """A body that the server accepts and in which it looks at this field."""
    if name == "AbortRequest":
        return {}
    return VALID[name]


def _samples(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at and beyond the edges of a field's schema, and whether they are allowed."""
    kinds = schema.get("anyOf", [schema])
    types = schema.get("type", [])
    if "null" in types or {"type": "null"} in kinds:
        yield None, True
    if "integer" in types:
        yield schema["minimum"], True
        yield schema["minimum"] - 1, False
        yield schema["minimum"] + 0.5, False
        if schema["maximum"] < 2**31:
            yield schema["maximum"], True
        yield schema["maximum"] + 1, False
    elif "number" in types:
        low = schema["minimum"] if "minimum" in schema else schema["exclusiveMinimum"]
        yield schema["maximum"], True
        yield schema["maximum"] * 1.01, False
        yield low, "minimum" in schema
        yield low - 0.01, False
        yield "1", False
    elif "boolean" in types:
        yield True, True
        yield 1, False
    elif "string" in types:
        yield 5, False
        if "maxLength" in schema:
            yield "x" * schema["maxLength"], True
            yield "x" * (schema["maxLength"] + 1), False
            yield "", False
    elif "array" in types and "items" in schema and schema["items"].get("type") == "integer":
        yield [7] * 3, True
        yield [7] * (schema["maxItems"] + 1), False
        yield [-1], False
        yield {"a": 1}, False
    elif "object" in types:
        yield "x", False
        if "maxProperties" in schema:
            number = schema.get("additionalProperties", {}).get("maximum", 1)
            yield {"1": number}, True
            yield {str(key): number for key in range(schema["maxProperties"] + 1)}, False


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_edges_of_a_described_field_are_those_of_the_server(world: World, name: str, field: str) -> None:
    schema = SCHEMAS[name]["properties"][field]
    for value, is_allowed in _samples(schema):
        body = {**_valid_beside(name, field), **COMPANIONS.get(field, {}), field: value}
        if field in ("max_tokens", "max_completion_tokens") and value == 0:
            body["echo"] = True
        if value is None and (field in VALID[name] or field in _valid_beside(name, field)):
            continue  # something must be there, in this field or another
        if name == "AbortRequest" and value is None:
            continue
        if field == "min_tokens":
            del body["max_completion_tokens"]
        response = world.http.post(PATH_OF[name], json=body)
        if is_allowed:
            assert response.status_code == 200, (field, value, response.text)
        else:
            assert response.status_code in (400, 404), (field, value, response.text)
            assert field in response.json()["error"]["message"], response.text


def test_chunks_of_streams_are_as_described(world: World) -> None:
    """schemathesis looks at the framing of events, not at the JSON in them."""
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        path, body = PATH_OF[name], VALID[name]
        content = openapi_document()["paths"][path]["post"]["responses"]["200"]["content"]
        reference = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"][
            "$ref"
        ]
        validator = jsonschema_rs.validator_for({"$ref": reference, "components": {"schemas": SCHEMAS}})
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 1}
        if "chat" in path:
            options |= {"logprobs": True, "top_logprobs": 2}
        with world.http.stream("POST", path, json={**body, **options}) as response:
            events = events_of(response)
        assert len(events) > 3
        for event in events:
            validator.validate(event)
        with pytest.raises(jsonschema_rs.ValidationError):
            validator.validate({**events[0], "extra": 1})


def test_generated_requests_get_answers_as_described_and_no_5xx(world: World, tmp_path: Path) -> None:
    """schemathesis: valid and broken requests from the schema, on a real socket."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{world.url}/openapi.json",
        "--phases", "coverage,fuzzing", "--max-time", "25", "--request-timeout", "15", "--no-color",
        "--seed", "1",
        "--exclude-path", "/v1/embeddings",  # 501 is its answer
        "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "negative_data_rejection",
    ]  # fmt: skip
    # It leaves what it found in the current folder.
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
    assert world.http.get("/health").status_code == 200
