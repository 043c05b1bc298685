"""What holds for every path and method: no 5xx, an envelope, an id, no body after HEAD."""

from __future__ import annotations

import json
import socket

import pytest
from support.http_server import World, serving

PATHS = (
    "/", "/v1/models", "/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/v1/chat/completions",
    "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/health", "/livez", "/ready", "/readyz",
    "/metrics", "/version", "/server_info", "/get_server_info", "/flush_cache", "/reset_prefix_cache",
    "/abort_request", "/debug/cache", "/unknown", "/v1", "//", "*",
)  # fmt: skip


def ask(world: World, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own; status, headers, and every byte that comes after them."""
    host, _, port = world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status_line.split(" ")[1]), headers, body


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"])
def test_no_method_gives_a_5xx_anywhere(method: str) -> None:
    with serving() as world:
        for path in PATHS:
            status, headers, body = ask(world, method, path)
            assert status in (200, 404, 405), (path, status)
            assert headers["x-request-id"]
            if method == "HEAD":
                assert body == b"", path
            else:
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            if status == 405:
                assert method not in headers["allow"]


def test_a_post_without_a_body_gives_a_5xx_only_where_nothing_is_built() -> None:
    with serving() as world:
        statuses = {path: ask(world, "POST", path)[0] for path in PATHS}
        assert {path for path, status in statuses.items() if status >= 500} == {"/v1/embeddings"}
        assert statuses["/v1/embeddings"] == 501
