"""Bad input over the whole server: 4xx with the envelope, the engine lives, the next request works."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.http_server import error_of, read_until
from support.served import ServedModel, serve_ready
from support.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def _lives_on(fragments: ServedModel) -> Iterator[None]:
    engine, pid = fragments.metrics(), fragments.engine_process_id()
    yield
    assert fragments.complete("next", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert fragments.engine_process_id() == pid
    restarts = "forkpoint_engine_restarts_total"
    assert fragments.metrics()[restarts] == engine[restarts]


def refused(served: ServedModel, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return error_of(served.http.post(path, content=content, headers=headers), status)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        '"temperature": NaN', '"temperature": Infinity', '"temperature": 1e999', '"temperature": -1',
        '"temperature": "hot"', '"top_p": NaN', '"top_p": -0.5', '"top_k": -7', '"min_p": 3', '"n": 0',
        '"n": -1', '"n": 1000000000', '"max_tokens": -5', '"max_tokens": 0', '"max_tokens": 1e30',
        '"max_tokens": "many"', '"seed": 99999999999999999999999999', '"stop": [""]', '"stop": 7',
        '"presence_penalty": NaN', '"logit_bias": {"999999999": 5}', '"logit_bias": {"-1": 5}',
        '"stop_token_ids": [320]', '"stop_token_ids": [-1]', '"model": "nobody"', '"model": 3',
        '"cache_salt": ""', '"stream_options": []',
    ],
)  # fmt: skip
def test_wrong_field_is_a_4xx_whether_streamed_or_not(
    fragments: ServedModel, path: str, is_stream: bool, field: str
) -> None:
    """Cases A3, A5, A6 and A9: an error is a plain JSON answer, never a stream without an end."""
    prompt = '"prompt": "x", "messages": [{"role": "user", "content": "x"}]'
    body = f'{{{prompt}, {field}, "stream": {json.dumps(is_stream)}}}'.encode()
    refused(fragments, path, body, 404 if "nobody" in field else 400)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
             b'{"prompt": "a", "x": ' + b"[" * 60_000 + b"]" * 60_000 + b"}"]
)  # fmt: skip
def test_broken_json_is_a_400(fragments: ServedModel, body: bytes) -> None:
    """Also case C3's twin: deep nesting in an ignored field."""
    refused(fragments, COMPLETIONS, body)
    refused(fragments, CHAT, body)


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", {}, [None], ["hi"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    ],
)  # fmt: skip
def test_wrong_messages_are_a_400(fragments: ServedModel, messages: Any) -> None:
    refused(fragments, CHAT, {"messages": messages})


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], "", [-1], [VOCAB_SIZE], [10**30], [1.5], [True], ["a", 1], [[1], 2]]
)
def test_wrong_prompt_is_a_400(fragments: ServedModel, prompt: Any) -> None:
    """The tiny tokenizer adds no BOS, so an empty text has no token at all."""
    refused(fragments, COMPLETIONS, {"prompt": prompt})


@pytest.mark.parametrize("excess", [0, 500])
def test_prompt_beyond_the_context_is_refused_with_both_numbers(fragments: ServedModel, excess: int) -> None:
    """Case C4: nothing is cut off silently, in either API."""
    length = CONTEXT_LENGTH + excess
    error = refused(fragments, COMPLETIONS, {"prompt": [7] * length})
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"] and str(CONTEXT_LENGTH) in error["message"]
    chat = {"messages": [{"role": "user", "content": "h" * length}]}
    error = refused(fragments, CHAT, chat)
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT_LENGTH) in error["message"]


def test_prompt_that_fills_the_context_but_for_one_token_answers(fragments: ServedModel) -> None:
    answer = fragments.complete([7] * (CONTEXT_LENGTH - 1), max_tokens=50, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_request_that_can_never_fit_in_the_pools_is_refused_at_once(fragments_dir: Path) -> None:
    pools = ("--page-size", "16", "--max-total-tokens", "320", "--swa-total-tokens", "160")
    with serve_ready(fragments_dir, *pools) as small:
        error = refused(small, COMPLETIONS, {"prompt": [7] * 400})
        assert "400" in error["message"] and "320" in error["message"]
        error = refused(small, COMPLETIONS, {"prompt": [7] * 100, "max_tokens": 300})
        assert "300" in error["message"] and "320" in error["message"]
        # Without a number the answer gets what the pool has, and ends with its end.
        answer = small.complete([7] * 100, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        small.flush()


def test_official_client_reads_the_error(fragments: ServedModel) -> None:
    """Case A9."""
    with pytest.raises(openai.BadRequestError) as caught:
        fragments.openai.chat.completions.create(
            model=fragments.model, messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    body = caught.value.body
    assert isinstance(body, dict)
    assert "temperature" in body["message"]
    assert body["type"] == "invalid_request_error" and "code" in body
    with pytest.raises(openai.NotFoundError):
        fragments.openai.completions.create(model="nobody", prompt="x")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", COMPLETIONS, 405), ("POST", "/v1/nothing", 404)],
)
def test_unknown_path_and_wrong_method_have_the_envelope(
    fragments: ServedModel, method: str, path: str, status: int
) -> None:
    error_of(fragments.http.request(method, path), status)


def test_nonsense_on_the_socket_is_a_400(fragments: ServedModel) -> None:
    host, _, port = fragments.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 400")
