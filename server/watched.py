"""Runs a request's work beside its watchers, so that a client that leaves ends it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from forkpoint.server.errors import ClientGone

T = TypeVar("T")


async def run_watched(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, NoReturn]) -> T:
    """The result of `work`. The first watcher that raises cancels it, and that error is raised instead.

    If both end at the same moment the work counts: its answer is complete.
    """
    work_task = asyncio.create_task(work)
    watcher_tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        await asyncio.wait([work_task, *watcher_tasks], return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            for task in watcher_tasks:
                if task.done():
                    task.result()
        return await work_task
    finally:
        tasks: list[asyncio.Task[Any]] = [work_task, *watcher_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def raise_on_disconnect(receive: Receive) -> NoReturn:
    """Wait until the client is gone. The body must have been read before: what still comes is dropped."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
