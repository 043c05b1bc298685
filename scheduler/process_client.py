"""The engine in a process of its own, seen from the API process: spawn, pipe, death and restart."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import structlog

from forkpoint.configs.errors import EngineDied, EngineLoading, ModelLoadError
from forkpoint.configs.serving import EngineConfig
from forkpoint.configs.start_clock import Stages
from forkpoint.scheduler.client import EngineState, TokenMailbox
from forkpoint.scheduler.mailboxes import Mailboxes
from forkpoint.scheduler.messages import (
    Abort,
    CacheDescribed,
    DescribeCache,
    EngineInfo,
    EngineStats,
    Failed,
    FlushCache,
    FlushDone,
    FromEngine,
    LoadProgress,
    Ready,
    Shutdown,
    StepTokens,
    Submit,
    ToEngine,
)
from forkpoint.scheduler.tickets import Tickets

log = structlog.get_logger("forkpoint.engine_client")

MAX_DEATHS = 5
DEATHS_WITHIN_S = 600.0
MAX_BACKOFF_S = 30.0
STOP_PATIENCE_S = 5.0

EntryPoint = Callable[[EngineConfig, Connection, Connection], None]


def _spawned(config: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    # Imported in the child only: the API process must not import torch.
    from forkpoint.scheduler.engine_process import run_engine_process

    run_engine_process(config, inbox, outbox)


class _Link:
    """One engine process and its two pipes. Sending goes through a thread, since a full pipe blocks."""

    def __init__(self, entry: EntryPoint, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        child_inbox, self._outbox = context.Pipe(duplex=False)
        self.inbox, child_outbox = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=entry, args=(config, child_inbox, child_outbox), name="forkpoint-engine", daemon=True
        )
        self.process.start()
        child_inbox.close()
        child_outbox.close()
        self._to_send: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="engine-sender", daemon=True)
        self._sender.start()

    def send(self, message: ToEngine) -> None:
        self._to_send.put(message)

    def _send_all(self) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):
            while (message := self._to_send.get()) is not None:
                self._outbox.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def kill(self) -> None:
        """End the process now, whatever it does."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process, by force if it does not go, and close the pipes. Blocks for seconds at most."""
        self._to_send.put(None)
        self.process.join(STOP_PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._sender.join(STOP_PATIENCE_S)
        self._outbox.close()
        self.inbox.close()


class ProcessEngine:
    """EngineClient over a spawned process. It is restarted when it dies; after MAX_DEATHS it is given up.

    max_queued: unfinished requests allowed beyond those that can run at once.
    """

    def __init__(
        self, config: EngineConfig, *, max_queued: int | None = None, entry: EntryPoint = _spawned
    ) -> None:
        self._config = config
        self._entry = entry
        self._mailboxes = Mailboxes(max_queued=max_queued)
        self._state = EngineState.LOADING
        self._info: EngineInfo | None = None
        self._stages: Stages = ()
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._link: _Link | None = None
        self._restart: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque()
        self._num_restarts = 0
        self._failure: Failed | None = None
        self._progress_listeners: list[Callable[[LoadProgress], None]] = []
        self._tickets = Tickets()
        self._busy_since: float | None = None

    # ---- what the server sees

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._mailboxes.stats

    @property
    def stages(self) -> Stages:
        """What the engine's process spent its last start on; empty until it is ready."""
        return self._stages

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def seconds_since_step(self) -> float:
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    @property
    def process_id(self) -> int | None:
        """The engine's process id while it lives."""
        return None if self._link is None else self._link.process.pid

    def on_step(self, listener: Callable[[StepTokens], None]) -> None:
        self._mailboxes.on_step(listener)

    def on_progress(self, listener: Callable[[LoadProgress], None]) -> None:
        self._progress_listeners.append(listener)

    def spawn(self) -> None:
        """Begin the process before there is an event loop; start() goes on with it.

        It loads beside whatever this process does meanwhile. Whoever calls this must see to close().
        """
        assert self._link is None, "it runs already"
        self._link = _Link(self._entry, self._config)

    def close(self) -> None:
        """Kill the process if there still is one: where start() was never called, or its loop is gone.

        Idempotent; does nothing after stop().
        """
        link, self._link = self._link, None
        if link is not None:
            self._state = EngineState.STOPPED
            link.kill()

    async def start(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._launch()

    async def wait_ready(self) -> EngineInfo:
        assert self._ready is not None, "start() comes first"
        return await asyncio.shield(self._ready)

    def submit(self, submit: Submit) -> TokenMailbox:
        if self._state is EngineState.LOADING:
            raise EngineLoading("the model is being loaded", retry_after_s=5)
        if self._state is not EngineState.READY or self._link is None or self._info is None:
            raise EngineDied("the engine is being restarted", retry_after_s=5)
        mailbox = self._mailboxes.open(submit.uid, max_running=self._info.max_running_requests)
        self._send(submit)
        return mailbox

    def abort(self, uid: int) -> None:
        if self._mailboxes.close(uid) and self._state is EngineState.READY:
            self._send(Abort(uid))

    async def flush_cache(self) -> bool:
        self._require_ready()
        ticket, future = self._tickets.take()
        self._send(FlushCache(ticket))
        done = await future
        assert isinstance(done, FlushDone)
        return done.cleared

    async def describe_cache(self, max_nodes: int) -> CacheDescribed:
        self._require_ready()
        ticket, future = self._tickets.take()
        self._send(DescribeCache(ticket, max_nodes))
        described = await future
        assert isinstance(described, CacheDescribed)
        return described

    def _require_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineLoading("the engine is not ready")

    async def stop(self) -> None:
        if self._state is EngineState.STOPPED:
            return
        self._state = EngineState.STOPPED
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        link = self._detach()
        if link is not None:
            link.send(Shutdown())
            await asyncio.to_thread(link.close)
        self._fail_all(EngineDied("the engine was stopped"))

    # ---- the pipe

    def _launch(self) -> None:
        self._state = EngineState.LOADING
        self._failure = None
        if self._link is None:
            self.spawn()
        assert self._link is not None
        asyncio.get_running_loop().add_reader(self._link.inbox.fileno(), self._read)

    def _send(self, message: ToEngine) -> None:
        assert self._link is not None
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._link.send(message)

    def _read(self) -> None:
        """The pipe is readable: take what is there, or learn that the process is gone."""
        link = self._link
        assert link is not None
        try:
            while link.inbox.poll():
                self._take(pickle.loads(link.inbox.recv_bytes()))
        except (EOFError, OSError):
            self._died()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepTokens):
            self._mailboxes.deliver(message)
            self._note_step(message.stats)
        elif isinstance(message, FlushDone | CacheDescribed):
            self._mailboxes.stats = message.stats
            self._note_step(message.stats)
            self._tickets.answer(message)
        elif isinstance(message, LoadProgress):
            for listener in self._progress_listeners:
                listener(message)
        elif isinstance(message, Ready):
            self._stages = message.stages
            self._become_ready(message.info)
        else:
            self._failure = message

    def _note_step(self, stats: EngineStats) -> None:
        self._busy_since = time.monotonic() if stats.running or stats.waiting else None

    def _become_ready(self, info: EngineInfo) -> None:
        self._info = info
        self._state = EngineState.READY
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(info)

    def _detach(self) -> _Link | None:
        link, self._link = self._link, None
        if link is not None:
            asyncio.get_running_loop().remove_reader(link.inbox.fileno())
        self._busy_since = None
        return link

    # ---- death and restart

    def _died(self) -> None:
        was_ready = self._state is EngineState.READY
        link = self._detach()
        self._state = EngineState.DEAD
        message = self._failure.message if self._failure else "the engine process ended"
        self._fail_all(EngineDied(message, retry_after_s=5))
        assert link is not None and self._ready is not None
        if not self._ready.done():
            # It never served: the cause is the user's to mend, and trying again would only repeat it.
            self._state = EngineState.STOPPED
            self._ready.set_exception(self._load_error())
            self._restart = asyncio.create_task(asyncio.to_thread(link.close))
            return
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > DEATHS_WITHIN_S:
            self._deaths.popleft()
        log.error("engine_died", was_ready=was_ready, deaths=len(self._deaths), reason=message)
        self._restart = asyncio.create_task(self._bring_back(link))

    def _load_error(self) -> Exception:
        if self._failure is not None:
            return ModelLoadError(self._failure.message, hint=self._failure.hint)
        return EngineDied("the engine process ended while it was loading; it may have run out of memory")

    async def _bring_back(self, link: _Link) -> None:
        await asyncio.to_thread(link.close)
        if len(self._deaths) >= MAX_DEATHS:
            log.error("engine_given_up", deaths=len(self._deaths), within_s=DEATHS_WITHIN_S)
            self._state = EngineState.STOPPED
            return
        # The first restart is immediate; a crash loop must not burn the machine.
        await asyncio.sleep(0.0 if len(self._deaths) == 1 else min(2.0 ** len(self._deaths), MAX_BACKOFF_S))
        self._num_restarts += 1
        self._launch()

    def _fail_all(self, error: EngineDied) -> None:
        self._mailboxes.fail_all(error)
        self._tickets.fail_all(error)
