"""Ends running requests by their request id, as /abort_request asks for."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkpoint.configs.errors import RequestError
from forkpoint.server.request_id import request_id_of


class RunningRequests:
    """The requests under way that can be aborted, by id. Mutable; used on the event loop only.

    Ids are the clients' own, so several requests may have the same one: they are aborted together.
    """

    def __init__(self) -> None:
        self._aborts: dict[str, set[asyncio.Event]] = {}

    def enter(self, request_id: str) -> asyncio.Event:
        """Remember one request; the event is set when it is to end. Whoever enters must leave."""
        abort = asyncio.Event()
        self._aborts.setdefault(request_id, set()).add(abort)
        return abort

    def leave(self, request_id: str, abort: asyncio.Event) -> None:
        aborts = self._aborts[request_id]
        aborts.discard(abort)
        if not aborts:
            del self._aborts[request_id]

    def abort(self, request_id: str) -> int:
        """End the requests of this id; returns how many there are. Idempotent: 0 once they have ended."""
        aborts = self._aborts.get(request_id, set())
        for abort in aborts:
            abort.set()
        return len(aborts)


class AbortMiddleware:
    """Pure ASGI: what waits for the body or for the client to leave gets a RequestError at an abort.

    The request then ends as after any other error: its slot is free at the next step, and its client gets the
    envelope, as an answer or as the last event of its stream.
    """

    def __init__(self, app: ASGIApp, running: RunningRequests) -> None:
        self._app = app
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_generation = (
            scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        )
        if not is_generation:
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        abort = self._running.enter(request_id)
        try:
            await self._app(scope, _receive_until(abort, receive), send)
        finally:
            self._running.leave(request_id, abort)


def _receive_until(abort: asyncio.Event, receive: Receive) -> Receive:
    async def receive_or_raise() -> Message:
        receiving = asyncio.ensure_future(receive())
        aborting = asyncio.ensure_future(abort.wait())
        try:
            await asyncio.wait((receiving, aborting), return_when=asyncio.FIRST_COMPLETED)
            if abort.is_set():
                raise RequestError(
                    "the request was ended by /abort_request", status=409, code="request_aborted"
                )
            return receiving.result()
        finally:
            receiving.cancel()
            aborting.cancel()

    return receive_or_raise
