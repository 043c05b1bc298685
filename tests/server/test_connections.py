"""What happens on one connection: broken and endless headers, upgrades, HTTP/1.0, pipelined requests."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_server import raw_request, read_until, serving

from forkpoint.server.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol

_BODY = b'{"prompt": "hello", "max_tokens": 2}'
_LENGTH = b"Content-Length: %d\r\n" % len(_BODY)


class _Hasty(BoundedHttpProtocol):
    head_timeout_s = 0.05


def _connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes; a connection that it leaves open fails by the socket's timeout."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def _error_code(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head and b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_request_that_is_not_http_is_refused_with_the_envelope(request_bytes: bytes) -> None:
    with serving() as world, _connect(world.url) as connection:
        connection.sendall(request_bytes)
        assert _error_code(_read_to_end(connection), 400) == "invalid_http"


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"chunked", b"zz\r\n"),
        (b"chunked", b"5\r\nhello!!"),
        (b"gzip", _BODY),  # nothing tells where that body ends
    ],
)
def test_body_whose_framing_is_broken_is_refused_at_once(coding: bytes, body: bytes) -> None:
    with serving() as world, _connect(world.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: %b\r\n\r\n" % coding)
        connection.sendall(body)
        assert _error_code(_read_to_end(connection), 400) == "invalid_http"
        assert not world.engine.submits


def test_headers_without_end_are_refused_while_they_come() -> None:
    with serving() as world, _connect(world.url) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * (MAX_HEAD_BYTES // 6))
        assert _error_code(_read_to_end(connection), 431) == "headers_too_large"


def test_long_headers_within_the_limit_and_long_bodies_are_taken() -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 1, "ignored": "x" * 3 * MAX_HEAD_BYTES}).encode()
    with serving() as world, _connect(world.url) as connection:
        for _ in range(2):  # what was counted for one request must not count for the next
            head = b"POST /v1/completions HTTP/1.1\r\nx: %s\r\n" % (b"y" * (MAX_HEAD_BYTES - 200))
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert b"200 OK" in read_until(connection, b'"text":"h"')


def test_headers_that_do_not_arrive_in_time_end_the_connection() -> None:
    with serving(protocol=_Hasty) as world:
        with _connect(world.url) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: ")
            _error_code(_read_to_end(connection), 408)
        with _connect(world.url) as connection:
            assert _read_to_end(connection) == b""
        with _connect(world.url) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            read_until(connection, b'{"status":"ok"}')
            connection.sendall(b"GET /livez HT")
            _error_code(_read_to_end(connection), 408)


def test_slow_answers_are_not_cut_by_the_time_limit_of_headers() -> None:
    with serving(FakeEngine(is_held=True), protocol=_Hasty) as world:
        body = {"prompt": "hello", "max_tokens": 1, "stream": True}
        with raw_request(world.url, "/v1/completions", body) as connection:
            world.engine.until(lambda: len(world.engine.submits) == 1)
            connection.sendall(b"\r\nGET")  # begins another request and never ends it
            with _connect(world.url) as other:
                assert _read_to_end(other) == b""  # so the time is over
            world.engine.release()
            assert _read_to_end(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_request_that_offers_an_upgrade_is_answered_as_if_it_did_not(protocol: bytes) -> None:
    """As Java's HttpClient sends every request on a plain connection."""
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABkAAQ\r\n" % protocol
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + upgrade + _LENGTH + b"\r\n"
    with serving() as world, _connect(world.url) as connection:
        for pieces in ([head + _BODY], [head, _BODY], [head[:90], head[90:] + _BODY[:9], _BODY[9:]]):
            for piece in pieces:
                connection.sendall(piece)
            assert b"200 OK" in read_until(connection, b'"text":"he"')


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_of_http_1_0_gets_no_chunks(is_stream: bool) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": is_stream}).encode()
    with serving() as world, _connect(world.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, content = _read_to_end(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"connection: close" in head and b"transfer-encoding" not in head
    if is_stream:
        assert content.startswith(b'data: {"id":') and content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"][0]["text"] == "he"


def test_pipelined_requests_are_answered_in_order() -> None:
    request = b"POST /v1/completions HTTP/1.1\r\n" + _LENGTH + b"\r\n" + _BODY
    with serving() as world, _connect(world.url) as connection:
        connection.sendall(request * 3 + b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = _read_to_end(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b'"text":"he"') == 3
    assert answers.index(b"404 Not Found") > answers.rindex(b"200 OK")


def test_client_that_leaves_after_pipelining_frees_its_sequences() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        with raw_request(world.url, "/v1/completions", {"prompt": "hi", "n": 2}) as connection:
            world.engine.until(lambda: len(world.engine.submits) == 2)
            connection.sendall(b"GET /livez HTTP/1.1\r\n\r\n" * 2)
        world.engine.until(lambda: len(world.engine.aborts) == 2)


def test_garbage_behind_a_running_request_does_not_get_into_its_answer() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        body = {"prompt": "hello", "max_tokens": 2, "stream": True}
        with raw_request(world.url, "/v1/completions", body) as connection:
            world.engine.until(lambda: len(world.engine.submits) == 1)
            connection.sendall(b"garbage\r\n\r\n")
            world.engine.release()
            answer = _read_to_end(connection)
    assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
