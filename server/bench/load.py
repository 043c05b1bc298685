"""Asks all conversations, in a closed loop or an open one, and records each request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forkpoint.server.bench.record import Answer, RequestRecord
from forkpoint.server.bench.workload import Conversation

# The client looks how late the event loop wakes it this often: what it adds to every time it measures.
_LAG_INTERVAL_S = 0.02


class Asker(Protocol):
    """What a Target does for a load."""

    async def answer(self, conversation: Conversation, history: Sequence[tuple[str, str]]) -> Answer: ...


@dataclass(slots=True)
class Run:
    """What a load has brought so far. Mutable: it grows while the load runs.

    lags_s: how late the client's own event loop was, each time it looked.
    """

    records: list[RequestRecord] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    was_stopped: bool = False


class Load:
    """Runs conversations; each asks its turns in order, the next one when the last is answered."""

    def __init__(
        self,
        asker: Asker,
        wanted_tokens: int,
        *,
        on_record: Callable[[RequestRecord], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.run = Run()
        self._asker = asker
        self._wanted_tokens = wanted_tokens
        self._on_record = on_record
        self._clock = clock
        self._sleep = sleep
        self._begin_s = clock()

    async def closed(self, conversations: Sequence[Conversation], concurrency: int) -> None:
        """`concurrency` conversations at a time; each begins when another has ended."""
        self._begin_s = self._clock()
        waiting = iter(conversations)

        async def work() -> None:
            for conversation in waiting:  # shared: each is taken once
                await self._converse(conversation, planned_s=None)

        await self._all([work() for _ in range(min(concurrency, len(conversations)))])

    async def open(
        self, conversations: Sequence[Conversation], arrivals_s: Sequence[float], concurrency: int | None
    ) -> None:
        """Each conversation begins at its time, or later where `concurrency` of them are under way."""
        self._begin_s = self._clock()
        room = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

        async def begin(conversation: Conversation, planned_s: float) -> None:
            await self._sleep(max(0.0, self._begin_s + planned_s - self._clock()))
            async with room:
                await self._converse(conversation, planned_s=planned_s)

        await self._all([begin(each, at_s) for each, at_s in zip(conversations, arrivals_s, strict=True)])

    async def _all(self, works: Sequence[Coroutine[Any, Any, None]]) -> None:
        watch = asyncio.ensure_future(self._watch_lag())
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.run.was_stopped = True
            raise
        finally:
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)

    async def _converse(self, conversation: Conversation, planned_s: float | None) -> None:
        history: list[tuple[str, str]] = []
        for turn, question in enumerate(conversation.questions):
            start_s = self._clock() - self._begin_s
            answer = await self._asker.answer(conversation, history)
            record = RequestRecord(
                conversation=conversation.number,
                turn=turn,
                prefix=conversation.prefix,
                is_warmup=conversation.is_warmup,
                start_s=start_s,
                lag_s=max(0.0, start_s - planned_s) if turn == 0 and planned_s is not None else 0.0,
                wanted_tokens=self._wanted_tokens,
                answer=answer,
            )
            self.run.records.append(record)
            self._on_record(record)
            if record.has_failed:
                return  # the turns after it would be another conversation
            history.append((question, answer.text))

    async def _watch_lag(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.run.lags_s.append(max(0.0, time.perf_counter() - before_s - _LAG_INTERVAL_S))
