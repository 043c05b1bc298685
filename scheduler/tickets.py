"""Questions to the engine that wait for an answer, by ticket number."""

from __future__ import annotations

import asyncio
import itertools

from forkpoint.scheduler.messages import CacheDescribed, FlushDone

Answer = FlushDone | CacheDescribed


class Tickets:
    """Open questions. Mutable: it is the one place that knows who waits. Used on the event loop only."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Answer]] = {}

    def take(self) -> tuple[int, asyncio.Future[Answer]]:
        """A number of its own for a new question, and the future of its answer."""
        ticket = next(self._numbers)
        future = self._open[ticket] = asyncio.get_running_loop().create_future()
        return ticket, future

    def answer(self, message: Answer) -> None:
        """Hand an answer to who asked for it; a client that left is passed over."""
        future = self._open.pop(message.ticket)
        if not future.done():
            future.set_result(message)

    def fail_all(self, error: Exception) -> None:
        """Nobody will answer any more."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()
