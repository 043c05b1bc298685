"""An engine in the same process and thread, behind the same client interface: for tests and the debugger."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from forkpoint.configs.errors import EngineDied, EngineLoading
from forkpoint.scheduler.client import EngineState, TokenMailbox
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.mailboxes import Mailboxes
from forkpoint.scheduler.messages import (
    Abort,
    CacheDescribed,
    DescribeCache,
    EngineInfo,
    EngineStats,
    FlushCache,
    FlushDone,
    LoadProgress,
    StepTokens,
    Submit,
)


class InlineEngine:
    """Steps an Engine on the event loop itself; each step blocks the loop while it runs."""

    def __init__(self, engine: Engine, *, max_queued: int | None = None) -> None:
        self.engine = engine
        self.num_restarts = 0
        self._mailboxes = Mailboxes(max_queued=max_queued)
        self._state = EngineState.LOADING
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self.engine.info

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def seconds_since_step(self) -> float:
        return 0.0

    def on_step(self, listener: Callable[[StepTokens], None]) -> None:
        self._mailboxes.on_step(listener)

    def on_progress(self, listener: Callable[[LoadProgress], None]) -> None:
        """An in-line engine was loaded before: there is no progress to tell."""

    async def start(self) -> None:
        self._state = EngineState.READY
        self._task = asyncio.create_task(self._run())

    async def wait_ready(self) -> EngineInfo:
        return self.engine.info

    def submit(self, submit: Submit) -> TokenMailbox:
        if self._state is EngineState.LOADING:
            raise EngineLoading("the engine was not started")
        if self._state is not EngineState.READY:
            raise EngineDied("the engine is stopped")
        mailbox = self._mailboxes.open(submit.uid, max_running=self.engine.info.max_running_requests)
        self.engine.handle(submit)
        self._news.set()
        return mailbox

    def abort(self, uid: int) -> None:
        if self._mailboxes.close(uid):
            self.engine.handle(Abort(uid))
            self._news.set()

    async def flush_cache(self) -> bool:
        done = self.engine.handle(FlushCache(0))
        assert isinstance(done, FlushDone)
        return done.cleared

    async def describe_cache(self, max_nodes: int) -> CacheDescribed:
        described = self.engine.handle(DescribeCache(0, max_nodes))
        assert isinstance(described, CacheDescribed)
        return described

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._mailboxes.fail_all(EngineDied("the engine was stopped"))

    async def _run(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                self._mailboxes.deliver(self.engine.step())
                while self.engine.has_work:
                    await asyncio.sleep(0)
                    self._mailboxes.deliver(self.engine.step())
        except Exception:
            self._state = EngineState.DEAD
            self._mailboxes.fail_all(EngineDied("the engine's loop ended"))
            raise
