"""A lean HTTP/1.1 client: many streams in one process, each piece stamped with the time of its arrival.

httptools and asyncio instead of an HTTP library: a load test must not wait for its own client. httpx2 takes
several times as long for each event (docs/bench.md has the numbers), on the cores that the server may need.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
# A connection that the server closed while it was idle ends at once when it is used.
IDLE_CLOSE_S = 0.1

Sink = Callable[[bytes, float], None]


class WireError(Exception):
    """No whole answer came: no connection, a cut one, something that is no HTTP, or too long a time."""


@dataclass(frozen=True, slots=True)
class Response:
    """One whole answer. sent_s, ended_s: time.perf_counter() when the request was written and this ended."""

    status: int
    body: bytes
    sent_s: float
    ended_s: float


class WireClient:
    """Connections to one server, used again when they are idle. Mutable: owns them; close() ends them all."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """url: http or https, with a path or without."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n".encode()
        self._headers += b"User-Agent: forkpoint-bench\r\n"
        if api_key is not None:
            self._headers += b"Authorization: Bearer " + api_key.encode() + b"\r\n"
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        sink: Sink | None = None,
        on_sent: Callable[[float], None] | None = None,
    ) -> Response:
        """Send, and wait for the whole answer. Raises WireError.

        sink: gets the pieces of a body of status 200, and the time of each; Response.body lacks them then.
        on_sent: gets the time of the sending, before anything arrives.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n".encode() + self._headers
        if body:
            head += b"Content-Type: application/json\r\n"
        content = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        deadline_s = time.perf_counter() + timeout_s
        while True:
            connection, is_fresh = await self._connection()
            try:
                return await connection.exchange(content, deadline_s, sink, on_sent)
            except _Unanswered as exc:
                # The server had closed the connection while it was idle, and saw nothing of this request. One
                # that took it and died of it is a failure, not to be tried again.
                if is_fresh or exc.after_s > IDLE_CLOSE_S:
                    raise WireError("the server closed the connection without an answer") from exc
            finally:
                self._give_back(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
        self._all.clear()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection, False
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except (asyncio.TimeoutError, TimeoutError) as exc:
            raise WireError(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from exc
        except OSError as exc:
            raise WireError(f"no connection ({exc.strerror or exc})") from exc
        self._all.add(connection)
        return connection, True

    def _give_back(self, connection: _Connection) -> None:
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.abort()
            self._all.discard(connection)


class _Unanswered(Exception):
    """The connection ended after_s after the sending, and not a byte had come."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. Mutable: the state of the answer that is being read."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._body: list[bytes] = []
        self._status = 0
        self._sent_s = self._now_s = 0.0
        self._has_received = False
        self._is_complete = True
        self._ends_by_close = False

    @property
    def is_usable(self) -> bool:
        """True if it is open and has nothing on its way."""
        return self._transport is not None and not self._transport.is_closing() and self._is_complete

    async def exchange(
        self,
        content: bytes,
        deadline_s: float,
        sink: Sink | None,
        on_sent: Callable[[float], None] | None,
    ) -> Response:
        if self._transport is None or self._transport.is_closing():
            raise _Unanswered(0.0)
        loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._body, self._status = sink, [], 0
        self._has_received = self._is_complete = False
        self._waiter = loop.create_future()
        sent_s = self._sent_s = time.perf_counter()
        if on_sent is not None:
            on_sent(sent_s)
        self._transport.write(content)
        timer = loop.call_later(max(deadline_s - sent_s, 0.0), self._time_out)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return Response(self._status, b"".join(self._body), sent_s, self._now_s)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being its subclass

    def data_received(self, data: bytes) -> None:
        # Before anything else: what reading it costs must not count as the server's time.
        self._now_s = time.perf_counter()
        self._has_received = True
        if self._parser is None or self._is_complete:  # nobody asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(WireError(f"the server answers with no HTTP: {exc}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._has_received:
            self._end(_Unanswered(time.perf_counter() - self._sent_s))
        elif self._status and not self._is_complete:
            # A body without a length ends like this; who reads the stream knows whether it was whole.
            self._is_complete = True
            self._end(None if self._ends_by_close else WireError("the server ended the connection"))
        else:
            self._end(WireError("the server ended the connection"))

    def _time_out(self) -> None:
        self._end(WireError("no whole answer in time (--timeout-s)"))

    def _end(self, error: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        self._ends_by_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_close = False

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._sink is not None and self._status == 200:
            self._sink(piece, self._now_s)
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if 100 <= self._status < 200:  # an interim answer; the real one follows
            return
        self._is_complete = True
        if not self._parser.should_keep_alive():
            self.abort()
        self._end(None)
