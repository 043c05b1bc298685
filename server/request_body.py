"""Reads requests' bodies into JSON objects; whatever is wrong with one is a RequestError, never a 5xx.

Reading bodies must not hold up the event loop, nor fill the memory, however many large ones come at once.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from forkpoint.configs.errors import RequestError
from forkpoint.server.errors import TOO_MANY_VALUES, ClientGone, TooManyBodies

JsonObject = dict[str, object]

# What the values of a body may cost, in units of about 50 ns (November 2026): a body at the bound holds the
# GIL for 50 ms; 30 MB of brackets would hold it for 1.1 s, 30 MB of short keys for 1.5 s.
MAX_COST = 1_000_000
_COST_OF = {b"[": 2, b"{": 2, b",": 1, b":": 10}
# A body up to this size is parsed at once: it takes a millisecond at most.
_SMALL_BYTES = 64 * 1024
# Bodies in memory at once, in the largest that are allowed.
_MAX_LARGEST_BODIES = 8


class BodyReader:
    """Reads the bodies of all requests of one server. Mutable: counts the bytes that it holds.

    max_bytes: of one body. timeout_s: from the first byte of a body to its last.
    """

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_held_bytes = 0
        self._parsing = asyncio.Lock()

    async def read(self, scope: Scope, receive: Receive) -> JsonObject:
        """The body as a JSON object.

        orjson itself refuses NaN, Infinity, numbers beyond a double, lone surrogates, bad UTF-8 and more than
        1,024 levels. Raises RequestError (400, 408, 413, 415), TooManyBodies and ClientGone.
        """
        headers = Headers(scope=scope)
        _require_json_content_type(headers)
        with self._holding() as body:
            try:
                await asyncio.wait_for(self._receive(headers, receive, body), self._timeout_s)
            except asyncio.TimeoutError:
                problem = f"the body did not arrive within {self._timeout_s:g} s"
                raise RequestError(problem, status=408) from None
            value = await self._parse(body)
        if not isinstance(value, dict):
            raise RequestError("the body must be a JSON object", code="invalid_json")
        return value

    @contextmanager
    def _holding(self) -> Iterator[bytearray]:
        """A buffer whose bytes count as held until the end."""
        body = bytearray()
        try:
            yield body
        finally:
            self._num_held_bytes -= len(body)

    async def _receive(self, headers: Headers, receive: Receive, body: bytearray) -> None:
        """Fill `body`. Nothing of it is read if its declared length is too much."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        cost = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            body += piece
            self._num_held_bytes += len(piece)
            if len(body) > self._max_bytes:  # chunked uploads declare no length
                raise self._too_large()
            if len(body) > _SMALL_BYTES and self._num_held_bytes > _MAX_LARGEST_BODIES * self._max_bytes:
                raise TooManyBodies("too many large requests are being read; try again", retry_after_s=2)
            cost += sum(piece.count(mark) * price for mark, price in _COST_OF.items())
            if cost > MAX_COST:  # marks inside strings count too: there is no cheap way to tell them apart
                # Not 413: so many bytes are allowed, and their depth or their length would be a 400 too.
                raise RequestError(
                    "the body has too many JSON values; split the request", code=TOO_MANY_VALUES
                )
            if not message.get("more_body", False):
                return

    async def _parse(self, body: bytearray) -> object:
        """The value of a JSON text. Large ones are parsed one at a time, with a pause as long after each.

        Other requests need a few turns of the event loop; with the pauses they get half of the time. A
        worker thread would not help, since orjson holds the GIL from beginning to end.
        """
        if len(body) <= _SMALL_BYTES:
            return _loads(body)
        async with self._parsing:
            begin = time.monotonic()
            try:
                return _loads(body)
            finally:
                await asyncio.sleep(time.monotonic() - begin)

    def _too_large(self) -> RequestError:
        problem = f"the body is larger than {self._max_bytes} bytes"
        return RequestError(problem, status=413, code="body_too_large")


def _loads(body: bytearray) -> object:
    # Without collecting garbage, of which there is none: half a million lists would take ten times as long.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    finally:
        if was_enabled:
            gc.enable()


def _require_json_content_type(headers: Headers) -> None:
    content_type = headers.get("content-type")
    if content_type is None:
        return
    essence = content_type.partition(";")[0].strip().lower()
    if essence not in ("application/json", "text/json") and not essence.endswith("+json"):
        raise RequestError(
            f"content-type is {essence[:100]!r}; send application/json",
            status=415,
            code="unsupported_media_type",
        )
