"""The activity line: its figures over an interval, silence when idle, and an engine that was restarted."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest
import structlog
from support.fake_engine import FakeEngine

from forkpoint.configs.logs import configure_logging
from forkpoint.scheduler.messages import EngineStats, PoolStats
from forkpoint.server.activity import Activity, ActivityLog, write_line

BUSY = EngineStats(
    running=3,
    waiting=2,
    full=PoolStats(free=500, tree=400, locked=150, leased=100, capacity=1000),
    swa=PoolStats(free=50, tree=0, locked=0, leased=50, capacity=100),
    prompt_tokens=1000,
    cached_tokens=600,
    rebuilt_tokens=150,
    computed_tokens=250,
    generation_tokens=80,
    num_steps=40,
)


class Watched:
    """An activity log with a clock of the test's own, and what it wrote."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.now_s = 100.0
        self._lines: list[Activity] = []
        self.log = ActivityLog(self.engine, clock=lambda: self.now_s, write=self._lines.append)

    def after(self, seconds: float, stats: EngineStats) -> list[Activity]:
        self.now_s += seconds
        self.engine.stats = stats
        self._lines.clear()
        self.log.report()
        return list(self._lines)


def test_a_line_tells_what_runs_and_the_rates_since_the_last_one() -> None:
    watched = Watched()
    (line,) = watched.after(4.0, BUSY)
    assert line == Activity(
        running=3,
        waiting=2,
        prompt_tokens_per_s=250.0,
        generated_tokens_per_s=20.0,
        hit_rate=0.75,
        full_pool=0.25,
        swa_pool=0.5,
    )
    decoding = EngineStats(running=1, prompt_tokens=1000, generation_tokens=100, num_steps=60)
    (line,) = watched.after(5.0, decoding)
    assert (line.prompt_tokens_per_s, line.generated_tokens_per_s) == (0.0, 4.0)
    # No prompt was admitted, and a model without this kind of layers has no pool.
    assert line.hit_rate is line.swa_pool is None


def test_nothing_is_written_when_nothing_happens() -> None:
    watched = Watched()
    idle = EngineStats(prompt_tokens=10, generation_tokens=5, num_steps=5)
    assert watched.after(5.0, EngineStats()) == []
    assert len(watched.after(5.0, idle)) == 1, "a short request that ended between two reports"
    assert watched.after(5.0, idle) == []
    assert watched.after(3600.0, idle) == []
    # The rate is that of the last interval, not of the idle hour.
    (line,) = watched.after(5.0, EngineStats(prompt_tokens=20, generation_tokens=10, num_steps=9))
    assert line.generated_tokens_per_s == 1.0


def test_a_step_that_takes_long_is_still_work() -> None:
    watched = Watched()
    assert len(watched.after(5.0, BUSY)) == 1
    assert len(watched.after(5.0, BUSY)) == 1


def test_counters_of_a_new_engine_begin_at_zero() -> None:
    watched = Watched()
    watched.after(5.0, BUSY)
    watched.engine.num_restarts += 1
    (line,) = watched.after(5.0, EngineStats(running=1, prompt_tokens=10, generation_tokens=5, num_steps=5))
    assert (line.prompt_tokens_per_s, line.generated_tokens_per_s) == (2.0, 1.0)


def test_it_reports_until_it_is_cancelled() -> None:
    async def story() -> None:
        engine = FakeEngine(stats=BUSY)
        lines: list[Activity] = []
        log = ActivityLog(engine, write=lines.append)
        task = asyncio.create_task(log.run(interval_s=0.001))
        async with asyncio.timeout(10):
            while len(lines) < 3:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_the_line_is_structured_and_left_out_above_info() -> None:
    activity = Activity(1, 0, 2.5, 3.5, None, 0.5, 0.25)
    previous = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        written = {}
        for log_level in ("info", "warning"):
            stream = io.StringIO()
            configure_logging(log_level, "json", stream)
            write_line(activity)
            written[log_level] = stream.getvalue()
    finally:
        structlog.configure(**previous)
        root.handlers = handlers
        root.setLevel(level)
    line = json.loads(written["info"])
    assert (line["event"], line["level"]) == ("activity", "info")
    assert (line["running"], line["generated_tokens_per_s"], line["hit_rate"]) == (1, 3.5, None)
    assert written["warning"] == ""
