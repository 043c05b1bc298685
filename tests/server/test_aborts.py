"""/abort_request: ends a request by its id wherever it is, tells its client, and is idempotent."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_server import World, error_of, read_until, serving


@contextmanager
def request_with_id(world: World, request_id: str, **body: Any) -> Iterator[socket.socket]:
    """Sends a completion with this id; the socket is there to read the answer."""
    content = json.dumps({"prompt": "hello", "max_tokens": 100, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    host, _, port = world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def abort(world: World, body: dict[str, Any]) -> int:
    response = world.http.post("/abort_request", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["success"] is True
    return int(answer["num_aborted"])


@pytest.mark.parametrize("is_admitting", [True, False])
def test_a_request_is_ended_and_its_client_told(is_admitting: bool) -> None:
    """Running or still waiting in the engine; a second abort finds nothing more."""
    with serving(FakeEngine(is_held=True, is_admitting=is_admitting)) as world:
        engine = world.engine
        with request_with_id(world, "mine") as client, request_with_id(world, "other"):
            engine.until(lambda: engine.num_waiting == 2)
            if is_admitting:
                engine.step()
            assert abort(world, {"request_id": "mine"}) == 1
            answer = read_until(client, b"}}")
            assert answer.startswith(b"HTTP/1.1 409")
            assert b"x-request-id: mine" in answer
            assert b'"code":"request_aborted"' in answer
            engine.until(lambda: engine.num_waiting + engine.num_running == 1)
            assert abort(world, {"request_id": "mine"}) == 0
        engine.release()


def test_a_stream_ends_with_an_error_event() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        with request_with_id(world, "mine", stream=True) as client:
            world.engine.until(lambda: world.engine.num_waiting == 1)
            world.engine.step()
            begin = read_until(client, b"data: ")
            assert begin.startswith(b"HTTP/1.1 200")
            assert abort(world, {"rid": "mine"}) == 1
            end = read_until(client, b"[DONE]")
            assert b'"code":"request_aborted"' in end
        world.engine.until(lambda: world.engine.num_running == 0)


def test_requests_of_one_id_are_ended_together_and_several_ids_at_once() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        ids = ("twin", "twin", "single", "stays")
        clients = [request_with_id(world, request_id) for request_id in ids]
        sockets = [client.__enter__() for client in clients]
        world.engine.until(lambda: world.engine.num_waiting == 4)
        assert abort(world, {"request_ids": ["twin", "single", "unknown"]}) == 3
        for each in sockets[:3]:
            assert read_until(each, b"}}").startswith(b"HTTP/1.1 409")
        world.engine.until(lambda: world.engine.num_waiting == 1)
        for client in clients:
            client.__exit__(None, None, None)


def test_a_request_whose_body_has_not_come_is_ended_too() -> None:
    with serving() as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"X-Request-Id: slow\r\nContent-Length: 99\r\n\r\n{"
            )
            while abort(world, {"request_id": "slow"}) == 0:
                pass  # the server has not seen its head yet
            assert read_until(connection, b"}}").startswith(b"HTTP/1.1 409")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_id"),
        ({"request_id": 3}, "request_id"),
        ({"request_ids": "mine"}, "request_ids"),
        ({"request_ids": ["a"] * 1025}, "request_ids"),
    ],
)
def test_what_names_no_request_is_refused(body: dict[str, Any], param: str) -> None:
    with serving() as world:
        assert world.refused("/abort_request", body)["param"] == param


def test_it_needs_the_key() -> None:
    with serving(api_keys=("secret",)) as world:
        for path in (
            "/abort_request",
            "/abort_requests",
            "/server_info",
            "/get_server_info",
            "/v1/embeddings",
        ):
            error_of(world.http.post(path, json={"request_id": "x"}), 401)
