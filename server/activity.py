"""One log line every few seconds while there is work: what runs, how fast, how much of it was cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import structlog

from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import EngineStats, PoolStats

INTERVAL_S = 5.0

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Activity:
    """What happened since the last line.

    hit_rate: share of the prompt tokens admitted that were cached or rebuilt; None if none was admitted.
    full_pool, swa_pool: share that running sequences own or lock; None if the model has no such layers.
    """

    running: int
    waiting: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    hit_rate: float | None
    full_pool: float | None
    swa_pool: float | None


def write_line(activity: Activity) -> None:
    """Put it into the log."""
    _log.info("activity", **asdict(activity))


class ActivityLog:
    """Compares the engine's counters with those at the last line. Mutable: it remembers them."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[Activity], None] = write_line,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._write = write
        self._last = engine.stats
        self._last_s = clock()
        self._num_restarts = engine.num_restarts

    async def run(self, interval_s: float = INTERVAL_S) -> NoReturn:
        """Report again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.report()

    def report(self) -> None:
        """Write a line if anything happened since the last call, or is still to be done."""
        now_s, stats = self._clock(), self._engine.stats
        if self._engine.num_restarts != self._num_restarts:
            self._num_restarts, self._last = self._engine.num_restarts, EngineStats()
        last, elapsed_s = self._last, now_s - self._last_s
        self._last, self._last_s = stats, now_s
        if not (stats.running or stats.waiting or stats.num_steps > last.num_steps):
            return
        prompt = stats.prompt_tokens - last.prompt_tokens
        served = stats.cached_tokens + stats.rebuilt_tokens - last.cached_tokens - last.rebuilt_tokens
        self._write(
            Activity(
                running=stats.running,
                waiting=stats.waiting,
                prompt_tokens_per_s=round(prompt / elapsed_s, 1),
                generated_tokens_per_s=round(
                    (stats.generation_tokens - last.generation_tokens) / elapsed_s, 1
                ),
                hit_rate=round(served / prompt, 3) if prompt else None,
                full_pool=_use(stats.full),
                swa_pool=_use(stats.swa),
            )
        )


def _use(pool: PoolStats) -> float | None:
    return round((pool.leased + pool.locked) / pool.capacity, 3) if pool.capacity else None
