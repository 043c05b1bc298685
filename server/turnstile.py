"""Lets requests with bodies in one after the other, so that many at once do not hold up the probes."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


class TurnstileMiddleware:
    """A POST waits for its turn, and turns are some moments of the event loop apart.

    What comes in one moment would be begun in one: 200 requests of a millisecond each, and /health behind
    them. Pure ASGI; for one event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()  # first come, first served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            async with self._turn:
                await asyncio.sleep(0)
        await self._app(scope, receive, send)
