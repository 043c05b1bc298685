"""Server-sent events: pre-encoded frames, written by one stream that keeps a silent connection alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

import orjson
from starlette.types import Send

# ASGI extension: its "call" is a WriteNow for the body of this response.
WRITE_NOW = "forkpoint.write_now"
# Puts a part of a started response's body on its way; False if the caller must do it by `send`.
WriteNow = Callable[[bytes], bool]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def encode_event(payload: Mapping[str, object]) -> bytes:
    """One frame. JSON has no raw line breaks, so one line of data is always enough.

    A payload with a `type` (those of /v1/responses) names it in an `event:` line before, as OpenAI does.
    """
    event_type = payload.get("type")
    name = b"" if event_type is None else f"event: {event_type}\n".encode()
    return name + b"data: " + orjson.dumps(payload) + b"\n\n"


class EventStream:
    """The response of one streaming request. The status goes out with the first frame, not before:
    until then an error can still become an HTTP error.

    `send` waits while the client's socket is full, so nothing piles up here. write_now spares a frame the way
    through the `send` of every middleware, 5 us of 25 (November 2026).
    """

    def __init__(self, send: Send, write_now: WriteNow | None = None) -> None:
        self._send = send
        self._write_now = write_now
        self._writing = asyncio.Lock()  # the keep-alive task must not come between the start and a frame
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self.has_started = False
        self._has_finished = False

    async def write(self, frame: bytes) -> None:
        is_ready = self.has_started and not self._has_finished and not self._writing.locked()
        if is_ready and self._write_now is not None and self._write_now(frame):
            self._last_write = self._loop.time()
            return
        async with self._writing:
            if self._has_finished:  # a keep-alive that waited for the last frame to go out
                return
            if not self.has_started:
                await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                self.has_started = True
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
            self._last_write = self._loop.time()

    async def finish(self) -> None:
        """Write [DONE] and end the response."""
        await self.write(DONE)
        async with self._writing:
            self._has_finished = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, interval_s: float) -> NoReturn:
        """Write a comment whenever nothing was written for interval_s; proxies close silent connections."""
        while True:
            remaining_s = self._last_write + interval_s - self._loop.time()
            if remaining_s > 0:
                await asyncio.sleep(remaining_s)
            else:
                await self.write(KEEP_ALIVE)
