"""A response to a request whose body is given up half read: answers, then ends the connection."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LINGER_S = 2.0
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024


class ClosingResponse(Response):
    """Reads on for a moment between answer and close: closing a connection on which the client still sends
    resets it, and the client would never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard_body(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard_body(receive: Receive) -> None:
    num_discarded = 0
    while num_discarded < _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        num_discarded += len(message.get("body", b""))
