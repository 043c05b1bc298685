"""response_format and structured_outputs over HTTP: what reaches the engine, and what is refused before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_engine import FakeEngine, says
from support.grammar_checks import accepts
from support.http_server import World, serving
from support.text_doubles import EOS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"enum": ["big", "small"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving(FakeEngine(reply=says("x", EOS))) as shared:
        yield shared


def grammar_of(world: World, path: str, **body: Any) -> str | None:
    """The grammar that the engine is given for this request."""
    response = world.http.post(path, json={"messages": HELLO, "prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return world.engine.submits[-1].params.grammar


def schema_format(schema: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, **more}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_schema_binds_the_output_whether_strict_or_not(world: World, path: str) -> None:
    for strict in ({}, {"strict": True}, {"strict": False}, {"strict": None}):
        grammar = grammar_of(world, path, response_format=schema_format(CITY, **strict))
        assert grammar is not None
        assert accepts(grammar, '{"city": "Paris", "size": "big"}')
        assert accepts(grammar, '{"city":"Paris","size":"big"}')
        assert not accepts(grammar, '{"city": "Paris", "size": "huge"}')
        assert not accepts(grammar, '{"city": "Paris"}')


def test_there_is_at_most_one_space_between_tokens_of_json(world: World) -> None:
    for body in (
        {"response_format": schema_format(CITY)},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": CITY}},
    ):
        grammar = grammar_of(world, CHAT, **body)
        assert grammar is not None
        assert accepts(grammar, '{ "city" : "Paris" , "size" : "big" }')
        for text in (
            '{  "city": "Paris", "size": "big"}',
            '{"city":\n"Paris", "size": "big"}',
            '{"city":\t"Paris", "size": "big"}',
            ' {"city": "Paris", "size": "big"}',
            '{"city": "Paris", "size": "big"} ',
        ):
            assert not accepts(grammar, text)


def test_json_object_is_an_object_and_nothing_else(world: World) -> None:
    grammar = grammar_of(world, COMPLETIONS, response_format={"type": "json_object"})
    assert grammar is not None
    assert accepts(grammar, '{"a": [1, {"b": null}], "c": "\\né"}')
    assert not any(accepts(grammar, text) for text in ("[]", '"a"', "1", "null", ""))


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        ({"regex": "a/b\\d{2}"}, ["a/b12"], ["a/b1", "xa/b12", "a/b123"]),
        ({"regex": "^[a-c]+\n$"}, ["abc\n"], ["abc", "^abc\n$"]),
        ({"regex": "\\p{L}+"}, ["héß日"], ["1"]),
        ({"choice": ["yes", 'a "q" \\', "日本\n", "\x7f"]}, ["yes", 'a "q" \\', "日本\n", "\x7f"], ["ye"]),
        ({"grammar": 'start: "a" x\nx: "b" | "c" x'}, ["ab", "accb"], ["a", "abc"]),
        ({"grammar": 'root ::= "a" [0-9]+ ("x" | y)\ny ::= "z"*'}, ["a12x", "a1zz"], ["a", "axz"]),
        ({"json": json.dumps(CITY)}, ['{"city":"a","size":"big"}'], ["{}"]),
        ({"json": True}, ["[1]", "{}", "null"], ["", "x"]),
        ({"json_object": True}, ["{}"], ["[]"]),
    ],
)  # fmt: skip
def test_structured_outputs_bind_the_whole_output(
    world: World, structured: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for path in (CHAT, COMPLETIONS):
        grammar = grammar_of(world, path, structured_outputs=structured)
        assert grammar is not None
        assert [text for text in good if not accepts(grammar, text)] == []
        assert [text for text in bad if accepts(grammar, text)] == []


def test_without_a_form_nothing_binds_the_output(world: World) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
    ]
    for body in bodies:
        assert grammar_of(world, CHAT, **body) is None


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"foo": "bar"}, "required": ["foo"]}, "schema"),
        ({"type": "foo"}, "foo"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {"additionalItems": False}}}, "additionalItems"),
        ({"disallow": "string"}, "disallow"),
        ({"items": [{"type": "string"}]}, "prefixItems"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"enum": []}, "anyOf"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        # llguidance would skip what it does not know.
        ({"not": {}, "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"enum": ["x" * 1000] * 200}, "bytes"),
        ({"enum": list(range(30000))}, "values"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name_and_the_next_request_is_served(
    world: World, schema: dict[str, Any], named: str, is_stream: bool
) -> None:
    for path in (CHAT, COMPLETIONS):
        body = {
            "messages": HELLO,
            "prompt": "hi",
            "stream": is_stream,
            "response_format": schema_format(schema),
        }
        num_submits = len(world.engine.submits)
        error = world.refused(path, body)
        assert named in error["message"]
        assert error["param"].startswith("response_format.json_schema.schema")
        assert len(world.engine.submits) == num_submits
        world.chat()


@pytest.mark.parametrize("num_levels", [49, 400, 2_000, 60_000])
def test_a_deep_schema_is_refused_in_less_than_a_second(world: World, num_levels: int) -> None:
    schema = '{"type":"object","properties":{"a":' * num_levels + "{}" + "}}" * num_levels
    for path, field in ((CHAT, "response_format"), (COMPLETIONS, "response_format"), (CHAT, "tools")):
        value = f'{{"type":"json_schema","json_schema":{{"name":"c","schema":{schema}}}}}'
        if field == "tools":
            value = f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'
        began = time.monotonic()
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"prompt":"hi","{field}":{value}}}'
        world.refused(path, body.encode())
        assert time.monotonic() - began < 1
    world.chat()


def test_a_schema_of_48_levels_is_served(world: World) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(45):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert grammar_of(world, CHAT, response_format=schema_format(schema)) is not None


def test_names_of_properties_are_no_keywords_and_data_no_schemas(world: World) -> None:
    schema = {
        "type": "object",
        "properties": {"extends": {"type": "string"}, "disallow": {"const": {"divisibleBy": 1, "$ref": "#"}}},
        "examples": [{"extends": 1}],
    }
    assert grammar_of(world, CHAT, response_format=schema_format(schema)) is not None


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("ebnf", "grammar")],
)
def test_other_spellings_name_the_one_that_is_built(world: World, name: str, replacement: str) -> None:
    for path in (CHAT, COMPLETIONS):
        error = world.refused(path, {"messages": HELLO, "prompt": "hi", name: "x"})
        assert error["param"] == name
        assert "structured_outputs" in error["message"] and replacement in error["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": CITY}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": CITY}}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ],
)
def test_a_schema_that_would_not_be_followed_is_refused(
    world: World, asked: dict[str, Any], param: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        assert world.refused(path, {"messages": HELLO, "prompt": "hi", **asked})["param"] == param


def test_both_fields_at_once_are_refused(world: World) -> None:
    body = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    error = world.refused(CHAT, {"messages": HELLO, **body})
    assert error["param"] == "structured_outputs"


def test_every_choice_gets_the_grammar(world: World) -> None:
    world.engine.submits.clear()
    world.chat(n=3, response_format=schema_format(CITY))
    assert len({submit.params.grammar for submit in world.engine.submits}) == 1
    assert len(world.engine.submits) == 3
