"""The engine process: loads the model, then alternates between its inbox and a step until told to end.

One thread. The pipe to the API process closes when that process dies, whatever the reason; so does this one.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, MutableMapping
from multiprocessing.connection import Connection

import structlog

from forkpoint.configs.errors import ConfigError, ForkpointError, ModelLoadError
from forkpoint.configs.logs import configure_logging
from forkpoint.configs.serving import EngineConfig
from forkpoint.configs.start_clock import StartClock
from forkpoint.scheduler.engine import Engine, EngineBroken
from forkpoint.scheduler.messages import Failed, FromEngine, LoadProgress, Ready, Shutdown, ToEngine

log = structlog.get_logger("forkpoint.engine")

# How long the engine waits for a message before it uses an idle moment: to audit the cache, and once to load
# what grammars need.
IDLE_S = 2.0
IDLE_AUDIT_NODES = 5_000

# Turns of libgomp's loop in which a thread waits at a barrier before it sleeps; see shorten_spinning.
SPIN_TURNS = 2000

BuildEngine = Callable[[EngineConfig, Callable[[LoadProgress], None]], Engine]


def run_engine_process(config: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    """Entry point of the spawned process; returns when it is told to, or when the API process is gone."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the API process decides for both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    shorten_spinning(os.environ)

    from forkpoint.model.device import set_num_threads
    from forkpoint.scheduler.build import build_engine

    configure_logging(config.log_level, config.log_format)
    set_num_threads(config.num_threads)
    serve_pipe(config, inbox, outbox, build_engine)


def shorten_spinning(environment: MutableMapping[str, str]) -> None:
    """Let threads that wait at a barrier sleep soon, unless a person chose how they wait. Before torch comes.

    They spin for milliseconds by default, which beside a busy neighbour costs whole time slices. 8 streams of
    the demo on two such cores, tokens per second, medians of benchmarks/threads.py (December 2026): in a run
    5 by default, 50 with 10,000 turns, 80 with none; in another 64 with 10,000, 75 with 3,000, 95 with 1,000,
    87 with none. A turn takes 40 cycles on some processors and 140 on others: SPIN_TURNS lasts some tens of
    microseconds, which bridges the gap between two operations of a step.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_TURNS))


def serve_pipe(config: EngineConfig, inbox: Connection, outbox: Connection, build: BuildEngine) -> None:
    """Build an engine and serve it over two pipes."""
    start = StartClock("imports")

    def send(message: FromEngine) -> None:
        outbox.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def progress(step: LoadProgress) -> None:
        start.begin(step.what)
        send(step)

    try:
        engine = _build(build, config, progress)
        start.begin("ready")
        send(Ready(engine.info, start.stages))
        _loop(engine, inbox, send)
    except (ConfigError, ModelLoadError) as error:
        send(Failed(str(error), error.hint))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.warning("api_process_gone")
    except EngineBroken as error:
        log.error("engine_broken", reason=str(error))
        send(Failed(str(error)))


def _build(build: BuildEngine, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> Engine:
    try:
        return build(config, progress)
    except (ForkpointError, OSError, MemoryError):
        raise
    except Exception as error:
        log.exception("loading_failed")
        raise ModelLoadError(
            f"loading failed: {type(error).__name__}: {error}",
            hint="this is a fault of forkpoint; please report it",
        ) from error


def _loop(engine: Engine, inbox: Connection, send: Callable[[FromEngine], None]) -> None:
    is_idle_used = False
    while True:
        has_news = False
        while inbox.poll(_patience_s(engine, has_news=has_news, is_idle_used=is_idle_used)):
            message: ToEngine = pickle.loads(inbox.recv_bytes())
            if isinstance(message, Shutdown):
                return
            answer = engine.handle(message)
            if answer is not None:
                send(answer)
            has_news = True
        if engine.has_work or has_news:
            send(engine.step())
            is_idle_used = False
        else:
            # A request that arrives meanwhile waits: 20,000 nodes take 0.3 s.
            if engine.scheduler.cache.num_nodes <= IDLE_AUDIT_NODES:
                engine.scheduler.cache.audit()
            engine.scheduler.prepare_grammars()
            is_idle_used = True


def _patience_s(engine: Engine, *, has_news: bool, is_idle_used: bool) -> float | None:
    if engine.has_work or has_news:
        return 0.0
    return None if is_idle_used else IDLE_S
