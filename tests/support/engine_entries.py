"""Entry points of engine processes for tests: here, where a spawned process can import them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

from support.engine_world import EngineWorld

from forkpoint.cache import CacheGeometry
from forkpoint.configs.errors import ModelLoadError
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.engine_process import serve_pipe
from forkpoint.scheduler.messages import LoadProgress


def build_checked(_: EngineConfig, progress: Callable[[LoadProgress], None]) -> Engine:
    progress(LoadProgress("loading weights", 1, 1))
    world = EngineWorld(CacheGeometry(4, 16), full_pages=500, swa_pages=200, max_rows=64, max_running=2)
    return world.engine


def serve_checked(config: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    serve_pipe(config, inbox, outbox, build_checked)


def build_nothing(_: EngineConfig, progress: Callable[[LoadProgress], None]) -> Engine:
    raise ModelLoadError("tensor model.norm.weight is missing", hint="fetch it again")


def serve_broken_model(config: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    serve_pipe(config, inbox, outbox, build_nothing)


def die_at_once(config: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    os._exit(9)
