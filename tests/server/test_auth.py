"""API keys: what they guard, how they are compared, and that nothing of them leaks."""

from __future__ import annotations

import socket

import pytest
from support.http_server import MODEL, error_of, read_until, serving

KEYS = ("first-key", "zweiter-schlüssel")


def test_valid_keys_are_taken_with_any_case_of_the_scheme() -> None:
    with serving(api_keys=KEYS) as world:
        assert [model.id for model in world.openai.models.list()] == [MODEL, "alias"]
        for value in (b"bearer first-key", b"BEARER   first-key", "Bearer zweiter-schlüssel".encode()):
            assert world.http.get("/v1/models", headers={b"authorization": value}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"Bearer", b"Bearer wrong", b"first-key", b"Basic first-key",
        b"Bearer first-key2", b"Bearer first-ke", b"Bearer \xff\xfe", "Bearer ключ".encode(),
    ],
)  # fmt: skip
def test_anything_else_is_a_401(value: bytes | None) -> None:
    with serving(api_keys=KEYS) as world:
        headers = {} if value is None else {b"authorization": value}
        response = world.http.get("/v1/models", headers=headers)
        error = error_of(response, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "first-key" not in response.text


def test_only_the_page_and_the_probes_are_open() -> None:
    with serving(api_keys=KEYS) as world:
        for path in ("/health", "/livez", "/ready", "/readyz"):
            assert world.http.get(path).status_code == 200
        for path in ("/", "/ui/main.js"):
            assert world.http.get(path).status_code == 200
        closed = ("/debug/steps", "/debug/requests", "/ui/secret", "/v1/models", "/v1/models/x")
        for path in (*closed, "/metrics", "/version", "/unknown", "/health/"):
            error_of(world.http.get(path), 401)
        for path in ("/v1/completions", "/v1/chat/completions", "/flush_cache", "/reset_prefix_cache"):
            error_of(world.http.post(path, json={}), 401)
        assert world.engine.num_flushes == 0


def test_metrics_can_be_opened_alone() -> None:
    with serving(api_keys=KEYS, metrics_need_key=False) as world:
        assert world.http.get("/metrics").status_code == 200
        for path in ("/metrics/", "/version", "/debug/cache"):
            error_of(world.http.get(path), 401)


def test_key_is_asked_for_before_the_body_is_read() -> None:
    with serving(api_keys=KEYS) as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            # The body never comes: the answer must.
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 401")


def test_any_key_is_taken_by_a_server_without_one() -> None:
    with serving() as world:
        assert world.http.get("/v1/models", headers={"authorization": "Bearer x"}).status_code == 200
