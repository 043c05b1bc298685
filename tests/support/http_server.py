"""The real HTTP server on a free loopback port, in a thread, over a fake engine; with clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import uvicorn
from support.fake_engine import FakeEngine
from support.grammar_checks import CompilingChecks
from support.text_doubles import ByteTokenizer, TagTemplate

from forkpoint.configs.serving import ServerConfig
from forkpoint.server.app import create_app
from forkpoint.server.http_protocol import BoundedHttpProtocol
from forkpoint.server.listener import bind_listener, url_of
from forkpoint.server.services import Timing
from forkpoint.server.tracing import Tracing

MODEL = "org/tiny"


@dataclass
class World:
    """A running server. http: plain client; openai: the official one, without retries."""

    engine: FakeEngine
    tokenizer: ByteTokenizer
    template: TagTemplate | None
    url: str
    http: httpx2.Client
    openai: openai.OpenAI

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._post("/v1/completions", {"prompt": "hello", **body})

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Send a request that must be refused, and give its error object after checking the envelope."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.http.post(path, content=content, headers={"content-type": "application/json"})
        return error_of(response, status)

    def metric(self, line_start: str) -> float:
        """The value of the one sample of /metrics whose line starts like this."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(line_start)]
        assert len(lines) == 1, (line_start, lines)
        return float(lines[0].rpartition(" ")[2])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert isinstance(answer, dict)
        return answer


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object, after checking that the response is nothing but a well-formed envelope."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= 2048 + 200
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    return dict(body["error"])


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None,
    *,
    has_template: bool = True,
    template_knows_tools: bool = False,
    timing: Timing | None = None,
    protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    tracing: Tracing | None = None,
    **config: Any,
) -> Iterator[World]:
    engine = engine or FakeEngine()
    tokenizer = ByteTokenizer()
    template = TagTemplate(knows_tools=template_knows_tools) if has_template else None
    server_config = ServerConfig(**{"served_model_names": (MODEL, "alias"), **config})
    app = create_app(
        server_config,
        engine,
        tokenizer,
        template,
        timing=timing,
        grammars=CompilingChecks(),
        tracing=tracing,
    )
    if template is not None:
        template.calls.clear()  # of the server's start, which asks what the template knows
    listener = bind_listener("127.0.0.1", 0)
    url = url_of(listener)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
    )
    thread = _ServerThread(server, listener, engine)
    thread.start()
    assert thread.is_running.wait(10)
    key = server_config.api_keys[0] if server_config.api_keys else "unused"
    try:
        with (
            httpx2.Client(base_url=url, timeout=20) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client,
        ):
            yield World(engine, tokenizer, template, url, http, client)
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


@dataclass(eq=False)
class _ServerThread(threading.Thread):
    server: uvicorn.Server
    listener: Any
    engine: FakeEngine
    is_running: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        await self.engine.start()
        self.is_running.set()
        await self.server.serve(sockets=[self.listener])


@contextlib.contextmanager
def raw_request(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a request and do not wait for anything: the socket is there to be read, or closed, at any time."""
    content = json.dumps(body).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        yield connection


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    """Everything up to the first arrival of `marker`."""
    received = b""
    while marker not in received:
        piece = connection.recv(65536)
        assert piece, f"closed before {marker!r}: {received!r}"
        received += piece
    return received


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The JSON events of a finished stream, after checking the framing: LF lines, [DONE] last and once."""
    text = response.read().decode()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "\r" not in text and text.endswith("\n\n")
    frames = [frame for frame in text.removesuffix("\n\n").split("\n\n") if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert [frame for frame in frames if "[DONE]" in frame] == frames[-1:] == ["data: [DONE]"]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
