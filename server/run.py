"""Runs the API process: binds, starts the engine, serves, and on SIGTERM drains and ends with exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
import uvloop

from forkpoint.configs.errors import EngineDied
from forkpoint.configs.logs import configure_logging
from forkpoint.configs.serving import ServerConfig
from forkpoint.scheduler.client import EngineClient, EngineState
from forkpoint.server.activity import ActivityLog
from forkpoint.server.app import create_app
from forkpoint.server.http_protocol import BoundedHttpProtocol
from forkpoint.server.lifecycle import Lifecycle
from forkpoint.server.listener import bind_listener, url_of
from forkpoint.server.sd_notify import ServiceNotifier
from forkpoint.server.startup_report import report_fields
from forkpoint.server.structured_check import GrammarChecks, NoGrammars
from forkpoint.server.text_ports import PromptTemplate, TextTokenizer
from forkpoint.server.tracing import NoTracing, Tracing

# After the running streams were told to end: time for their last event to reach the clients.
_FAREWELL_S = 2.0
_ENGINE_CHECK_S = 1.0

_log = structlog.stdlib.get_logger(__name__)


def run_server(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    template: PromptTemplate | None,
    *,
    grammars: GrammarChecks | None = None,
    on_ready: Callable[[str], None] | None = None,
    notifier: ServiceNotifier | None = None,
    tracing: Tracing | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. To be called in the main thread.

    grammars: see create_app(). on_ready gets the URL once requests are served; from the bind until then they
    get 503. notifier: tells a service manager of readiness, of the drain, and that no step is stuck.
    tracing: closed at the end, when no request runs any more.
    Raises ConfigError if the address cannot be bound, ModelLoadError or EngineDied if the engine cannot be
    started or gave up.
    """
    configure_logging(config.log_level, config.log_format)
    listener = bind_listener(config.host, config.port)
    with contextlib.closing(listener):
        url = url_of(listener)
        _log.info("listening", url=url)
        grammars = grammars or NoGrammars()
        notifier = notifier or ServiceNotifier()
        tracing = tracing or NoTracing()

        def announce() -> None:
            notifier.ready(f"serving {config.served_model_names[0]} on {url}")
            if on_ready is not None:
                on_ready(url)

        return uvloop.run(
            _serve(config, engine, tokenizer, template, grammars, tracing, listener, announce, notifier)
        )


async def _serve(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    template: PromptTemplate | None,
    grammars: GrammarChecks,
    tracing: Tracing,
    listener: socket.socket,
    announce_ready: Callable[[], None],
    notifier: ServiceNotifier,
) -> int:
    app = create_app(config, engine, tokenizer, template, grammars=grammars, tracing=tracing)
    server = _SignalFreeServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,  # longer than the common proxies' 60 s, so that they close first
            timeout_graceful_shutdown=int(_FAREWELL_S),
        )
    )
    signals = _Signals()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    engine_watch = asyncio.create_task(_watch_engine(engine, grammars, announce_ready))
    activity = asyncio.create_task(ActivityLog(engine).run())
    # Only a stuck step is for others to end: a dead engine is started again, and a drain ends, by itself.
    watchdog = asyncio.create_task(notifier.feed_watchdog(lambda: not app.state.lifecycle.is_stuck))
    first_signal = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait([http, engine_watch, first_signal], return_when=asyncio.FIRST_COMPLETED)
        if engine_watch.done():
            engine_watch.result()
        notifier.stopping(f"finishing running requests, for {config.shutdown_timeout_s:g} s at most")
        await _drain(app.state.lifecycle, signals, config.shutdown_timeout_s)
    finally:
        first_signal.cancel()
        engine_watch.cancel()
        activity.cancel()
        watchdog.cancel()
        if not app.state.lifecycle.is_idle:
            server.abort_connections()  # of clients that do not even read their last event
        server.should_exit = True
        server.force_exit = signals.second.is_set()
        await asyncio.gather(http, engine_watch, activity, watchdog, first_signal, return_exceptions=True)
        server.abort_connections()
        await grammars.stop()
        await engine.stop()
        await tracing.close()
    _log.info("stopped")
    return 0


async def _watch_engine(
    engine: EngineClient, grammars: GrammarChecks, announce_ready: Callable[[], None]
) -> None:
    """Start it; ends only by raising what wait_ready raises, or EngineDied if the engine gave up for good."""
    await engine.start()
    info = await engine.wait_ready()
    # What was imported stays, and a full collection would look at all of it: 0.1 to 0.4 s without an answer
    # to anybody (November 2026).
    gc.collect()
    gc.freeze()
    _log.info("ready", **report_fields(info))
    announce_ready()
    await grammars.start()
    while engine.state is not EngineState.STOPPED:
        await asyncio.sleep(_ENGINE_CHECK_S)
    raise EngineDied("the engine ended too often and is not started again")


async def _drain(lifecycle: Lifecycle, signals: _Signals, timeout_s: float) -> None:
    """Refuse new requests; give running ones timeout_s, or until a second signal, and end them then."""
    lifecycle.begin_draining()
    _log.info("draining", timeout_s=timeout_s)
    idle = asyncio.create_task(lifecycle.wait_idle())
    second_signal = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait([idle, second_signal], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            lifecycle.expire()
            await asyncio.wait([idle], timeout=_FAREWELL_S)
    finally:
        idle.cancel()
        second_signal.cancel()
        await asyncio.gather(idle, second_signal, return_exceptions=True)


class _Signals:
    """The first SIGTERM or SIGINT asks to drain, the second to end now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        if self.first.is_set():
            self.second.set()
        self.first.set()


class _SignalFreeServer(uvicorn.Server):
    """uvicorn closes the listener at the first signal; here /ready must go on answering while it drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        """Drop what is still open, unsent data too: closing would wait for readers that never come."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHttpProtocol):
                connection.transport.abort()
