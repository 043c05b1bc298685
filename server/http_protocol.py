"""One HTTP connection: uvicorn's protocol with bounds on a request's headers and our error envelope.

It also gives right answers where uvicorn's are wrong: to requests that offer an upgrade, to HTTP/1.0 clients,
to clients that leave after pipelining.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forkpoint.configs.errors import RequestError
from forkpoint.server.errors import ErrorReply
from forkpoint.server.sse import WRITE_NOW

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope

MAX_HEAD_BYTES = 64 * 1024  # of request line and headers; what one read gives (256 KiB) is not looked into
# Read on behind so many unanswered requests: only who reads sees that the client is gone.
_MAX_PIPELINED = 8

_log = structlog.stdlib.get_logger(__name__)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Mutable: follows one connection.

    head_timeout_s: from the connection, or the first byte of a further request, to the end of its headers.
    """

    head_timeout_s = 30.0

    _reads_head = True
    _num_head_bytes = 0
    _is_refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch_head()
        # uvicorn tells only the request that came last.
        for cycle in (self._running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_refused:  # still read, to see the client leave
            return
        if self._reads_head:
            self._num_head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(RequestError("this is no valid HTTP/1.1 request", code="invalid_http"))
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            problem = f"the request's headers are larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(RequestError(problem, status=431, code="headers_too_large"))
        elif self._reads_head and self._num_head_bytes:
            self._watch_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # _feed() begins anew
        self._reads_head = False
        self._num_head_bytes = 0
        self._unwatch_head()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._reads_head = True

    def _feed(self, data: bytes) -> None:
        """Parse. Offers to upgrade are ignored, as RFC 9110 7.8 allows: Java's client offers h2c with every
        request, and the parser would take the request's body for bytes of the other protocol.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is for proxies") from upgrade
                version = self.parser.get_http_version().encode()
                lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
                lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                data = b"\r\n".join(lines) + b"\r\n\r\n" + data[upgrade.args[0] :]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        write_now: dict[object, object] = {"call": functools.partial(_write_now, cycle)}
        cycle.scope["extensions"] = {WRITE_NOW: write_now}
        is_unchunked = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if is_unchunked else app)

    # ---- refusals

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._expire_head)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire_head(self) -> None:
        self._head_timer = None
        if self._running is None and self._num_head_bytes == 0:
            self.transport.close()  # it asked nothing, so it gets no answer
            return
        problem = f"the request's headers did not arrive within {self.head_timeout_s:g} s"
        self._refuse(RequestError(problem, status=408))

    def _refuse(self, error: RequestError) -> None:
        """Answer, and end the connection; if another answer is on its way, end the connection after it."""
        self._is_refused = True
        self._unwatch_head()
        _log.debug("connection refused", reason=str(error))
        running = self._running
        is_in_body = running is not None and running is self.cycle and running.more_body
        if running is not None and is_in_body and not running.response_started:
            # Its own body is broken: the app would wait for the rest, and nothing of it will come.
            running.disconnected = True
            running.message_event.set()
        elif running is not None and not running.response_complete:
            running.keep_alive = False
            return
        if not self.transport.is_closing():
            body = ErrorReply.of(error).response().body
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
            self.transport.close()


def _write_now(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write one chunk of a started response, as RequestResponseCycle.send() does; False if it must wait."""
    is_started = cycle.response_started and not cycle.response_complete and cycle.chunked_encoding
    if not is_started or cycle.flow.write_paused or cycle.disconnected:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The app for a client of HTTP/1.0, which knows no chunks: the end of the connection ends its answer."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = sys.maxsize

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # uvicorn checks that it has come to 0 at the end.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
