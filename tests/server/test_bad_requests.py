"""Whatever is wrong with a request: 4xx, nothing reaches the engine, the next request works."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from support.fake_engine import INFO, FakeEngine
from support.http_server import MODEL, World, error_of, read_until, serving

from forkpoint.server.services import Timing

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_NO_NAMED_SCHEMAS: list[Any] = [None, [], "s", {}, {"schema": None}]
_NO_SCHEMAS: list[Any] = [[], "s", 5, False]


def _schema_format(named: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": named}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # One server for all rows: that it survives each of them is part of what is tested.
    with serving(max_body_bytes=300_000) as world:
        yield world


@pytest.fixture(autouse=True)
def _lives_on_untouched(world: World) -> Iterator[None]:
    num_before = len(world.engine.submits)
    yield
    assert len(world.engine.submits) == num_before
    world.complete(max_tokens=1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "top_p": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "nobody reads this": NaN}',
        b'{"prompt": "a", "top_k": ' + b"9" * 400 + b"}",
        b'{"prompt": "a", "stop": ["\\ud800"]}',
        b'{"prompt": "a", "ignored": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a",}',
    ],
)
def test_broken_json_is_a_400(world: World, path: str, body: bytes) -> None:
    # By this code it was the reader of JSON that refused, before any field was looked at.
    assert world.refused(path, body)["code"] == "invalid_json"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [5, [], True]),
        ("n", [0, -1, 129, 10**18, 1.0, "2", True]),
        ("max_tokens", [0, -1, 1.5, 5.0, "5", "null", True, 10**30]),
        ("max_completion_tokens", [0, -1, 1.5, "5", False]),
        ("temperature", [-0.1, 2.1, "1", True, [], 1e308]),
        ("top_p", [0, -0.1, 1.1, "1", True]),
        ("top_k", [-2, 1.0, "1", True]),
        ("min_p", [-0.1, 1.1, "0", False]),
        ("seed", [1.0, "1", 2**63, -(2**63) - 1, True]),
        ("stop", ["", [""], 5, {}, [5], [None], ["x"] * 17, True]),
        ("stop_token_ids", [5, [-1], [260], [1.0], [True], ["1"], [10**30], list(range(129))]),
        ("ignore_eos", [1, "true", []]),
        ("stream", ["true", 2]),
        ("stream_options", [True, [], {"include_usage": 1}]),
        ("skip_special_tokens", [0, "no"]),
        ("include_stop_str_in_output", [0, "no"]),
        ("add_special_tokens", [0, "no"]),
        ("cache_salt", ["", "x" * 129, 5, ["a"]]),
        ("logprobs", ["yes", -1, 1.0, 21]),
        ("logit_bias", [[], "5", 5]),
        (
            "logit_bias",
            [{key: 5} for key in ("999999999", "-1", "260", "x", "", "1.0", "1_0", "٣", "9" * 300)],
        ),
        ("logit_bias", [{"5": 100.1}, {"5": -101}, {"5": "1"}, {"5": None}, {"5": True}, {"5": 1e308}]),
        ("logit_bias", [{"5": 1, "05": 1}, {str(i): 1 for i in range(5000)}]),
        ("presence_penalty", [2.1, -2.1, "0", True]),
        ("frequency_penalty", [2.1, -2.1, "0", True]),
        ("repetition_penalty", [0, -1, 1e308, "1", True]),
        ("min_tokens", [-1, 1.0, "1", True]),
        ("prompt_logprobs", [1, 0]),
        ("response_format", ["json", [], {}, {"type": "xml"}, {"type": 5}, {"type": "json_schema"}]),
        ("response_format", [_schema_format(value) for value in _NO_NAMED_SCHEMAS]),
        ("response_format", [_schema_format({"schema": value}) for value in _NO_SCHEMAS]),
        ("structured_outputs", [[], "a", {"regex": "a", "choice": ["a"]}, {"xml": "a"}, {"regex": 5}]),
        ("structured_outputs", [{"choice": value} for value in ([], "a", [1], [""], ["a"] * 1025)]),
        ("structured_outputs", [{"regex": "("}, {"regex": ""}, {"regex": "(?=a)b"}, {"regex": "a" * 20000}]),
        ("structured_outputs", [{"grammar": "start: ("}, {"json": "{"}, {"json": 5}, {"json_object": 1}]),
        ("guided_json", [{}]),
        ("regex", ["a"]),
        ("ebnf", ["a"]),
        ("priority", [1]),
    ],
)
def test_wrong_or_unbuilt_field_is_named(
    world: World, path: str, field: str, values: list[Any], is_stream: bool
) -> None:
    valid = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": is_stream}
    for value in values:
        error = world.refused(path, {**valid, field: value})
        assert error["type"] == "invalid_request_error"
        assert error["param"].split(".")[0] == field, value
        assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("logprobs", 1),
        ("echo", True),
        ("functions", []),
    ],
)
def test_wrong_chat_field_is_named(world: World, field: str, value: Any) -> None:
    error = world.refused(CHAT, {"messages": [{"role": "user", "content": "hi"}], field: value})
    assert error["param"] == field


@pytest.mark.parametrize(("field", "value"), [("suffix", "end"), ("best_of", 2), ("logprobs", True)])
def test_unbuilt_completions_field_is_named(world: World, field: str, value: Any) -> None:
    assert world.refused(COMPLETIONS, {"prompt": "hi", field: value})["param"] == field


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, True, {}, [], [[]], [5.0], [True], [-1], [260], [10**30], [2**63], [1, "a"], ["a", 1],
        [[1], "a"], ["a", [1]], [[1], 2], [[1.5]], [[260]], [None], [[[1]]], ["a"] * 1025,
    ],
)  # fmt: skip
def test_wrong_prompt_is_refused(world: World, prompt: Any) -> None:
    assert world.refused(COMPLETIONS, {"prompt": prompt})["param"] == "prompt"


def test_stream_options_without_stream_are_refused(world: World) -> None:
    body = {"prompt": "hi", "stream_options": {"include_usage": True}}
    assert world.refused(COMPLETIONS, body)["param"] == "stream_options"


def test_too_many_sequences_in_one_request_are_refused(world: World) -> None:
    assert world.refused(COMPLETIONS, {"prompt": ["a"] * 9, "n": 128})["param"] == "n"


def test_unknown_model_is_a_404_with_its_name(world: World) -> None:
    error = world.refused(COMPLETIONS, {"prompt": "hi", "model": "nobody"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "nobody" in error["message"]
    world.refused(COMPLETIONS, {"prompt": "hi", "model": "x" * 100_000}, 404)


def test_official_client_sees_the_error_object(world: World) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    assert isinstance(caught.value.body, dict)
    assert "temperature" in caught.value.body["message"]
    assert caught.value.param == "temperature"
    # The client would take a flat object for the error too.
    assert caught.value.response.json() == {"error": caught.value.body}
    with pytest.raises(openai.NotFoundError):
        world.openai.completions.create(model="nobody", prompt="x")


def test_prompt_that_fills_the_context_is_refused_with_both_numbers(world: World) -> None:
    for body in ({"prompt": [65] * 2048}, {"prompt": "x" * 2047}, {"prompt": [65] * 2548}):
        error = world.refused(COMPLETIONS, body)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    assert "2548" in error["message"]
    messages = [{"role": "user", "content": "x" * 2040}]
    assert world.refused(CHAT, {"messages": messages})["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "num_tokens"),
    [
        (COMPLETIONS, {"prompt": "é" * 1100}, 1 + 2200),
        (CHAT, {"messages": [{"role": "user", "content": "é" * 1100}]}, len("user:|assistant:") + 2200),
    ],
)
def test_text_is_not_cut_either_where_only_its_tokens_are_too_many(
    world: World, path: str, body: dict[str, Any], num_tokens: int
) -> None:
    error = world.refused(path, body)
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"] and str(num_tokens) in error["message"]


def test_huge_text_is_refused_before_it_is_tokenised(world: World) -> None:
    num_before = world.tokenizer.num_encoded
    error = world.refused(COMPLETIONS, {"prompt": "x" * 150_000})
    assert error["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "x" * 150_000}]}
    assert world.refused(CHAT, chat)["code"] == "context_length_exceeded"
    assert world.tokenizer.num_encoded == num_before


def test_body_beyond_the_limit_is_a_413_with_and_without_a_length(world: World) -> None:
    headers = {"content-type": "application/json"}
    declared = world.http.post(COMPLETIONS, content=b" " * 300_001, headers=headers)
    assert error_of(declared, 413)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    chunked = world.http.post(COMPLETIONS, content=pieces(), headers=headers)
    assert error_of(chunked, 413)["code"] == "body_too_large"
    assert declared.headers["connection"] == chunked.headers["connection"] == "close"


def test_official_client_sees_the_413_of_a_body_far_beyond_the_limit(world: World) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        world.openai.completions.create(model=MODEL, prompt="x" * 20_000_000)
    assert caught.value.status_code == 413


def test_body_that_does_not_arrive_in_time_is_a_408() -> None:
    with serving(timing=Timing(body_timeout_s=0.05)) as other:
        host, _, port = other.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert read_until(connection, b"did not arrive").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET /livez HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 400"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n{}",
            b"HTTP/1.1 400",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
            b"HTTP/1.1 100",
        ),
    ],
)
def test_unusual_http_is_answered(world: World, request_bytes: bytes, answer: bytes) -> None:
    host, _, port = world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request_bytes)
        assert read_until(connection, b"\r\n").startswith(answer)


def test_content_type_must_be_json_if_there_is_one(world: World) -> None:
    response = world.http.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "Application/JSON"])
def test_json_content_types_are_taken(world: World, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = world.http.post(COMPLETIONS, content=b'{"n": 0}', headers=headers)
    assert error_of(response, 400)["param"] == "n"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/ui", "/ui/", "/ui/../app.py", "/v1", "/v1/decisions", "/v1/nothing",
        "/debug", "/docs", "/v1/completions/", "/%ff", "/" + "x" * 5000,
    ],
)  # fmt: skip
def test_unknown_path_is_a_404_envelope(world: World, method: str, path: str) -> None:
    assert error_of(world.http.request(method, path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", COMPLETIONS, "POST"), ("OPTIONS", CHAT, "POST"), ("GET", "/flush_cache", "POST")],
)
def test_wrong_method_is_a_405_envelope(world: World, method: str, path: str, allowed: str) -> None:
    response = world.http.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allowed


def test_request_that_can_never_fit_in_a_pool_is_refused_with_both_numbers(world: World) -> None:
    small = FakeEngine(info=replace(INFO, full_tokens=160, swa_tokens=128))
    with serving(small) as other:
        error = other.refused(COMPLETIONS, {"prompt": [65] * 145})
        assert "176" in error["message"] and "160" in error["message"]
        error = other.refused(COMPLETIONS, {"prompt": [65] * 100, "max_tokens": 61})
        assert error["param"] == "max_tokens"
        assert "176" in error["message"] and "160" in error["message"]
        assert other.complete(prompt=[65] * 100, max_tokens=60)["usage"]["completion_tokens"] == 60
        # Without a number the answer gets what the pool has.
        other.chat(messages=[{"role": "user", "content": "x" * 84}])
        assert small.submits[-1].params.max_tokens == 60


@pytest.mark.parametrize("num_choices", [1, 128])
def test_stop_string_that_would_cost_seconds_to_prepare_is_refused(world: World, num_choices: int) -> None:
    body = {"prompt": "a", "n": num_choices, "max_tokens": 1, "stop": ["x", "a" * 1025]}
    assert world.refused(COMPLETIONS, body)["param"] == "stop"


_CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * (INFO.context_length + 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * INFO.context_length}],
        [{"role": "assistant", "content": "", "tool_calls": [_CALL] * INFO.context_length}],
    ],
)
def test_more_pieces_than_the_context_has_tokens_are_refused_unread(world: World, messages: Any) -> None:
    """None of them has a character, so no bound on the length of the prompt stops them."""
    error = world.refused(CHAT, {"messages": messages, "max_tokens": 1})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "content parts" in error["message"]


def test_many_names_for_the_template_are_refused(world: World) -> None:
    kwargs = {f"name{i}": i for i in range(65)}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": kwargs}
    assert world.refused(CHAT, body)["param"] == "chat_template_kwargs"
