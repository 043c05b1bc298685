"""Metrics of windows, branch points and rebuilds: they move when the real cache does what they name."""

from __future__ import annotations

import asyncio

import numpy as np
from prometheus_client import CollectorRegistry
from support.engine_world import EngineWorld

from forkpoint.cache import CacheGeometry
from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.inline import InlineEngine
from forkpoint.scheduler.messages import Submit
from forkpoint.server.engine_metrics import EngineMetrics

SYSTEM = list(range(64))
PATIENCE_S = 60.0


class MeteredEngine:
    """A real scheduler and cache behind the client interface, with the server's metrics on top."""

    def __init__(self, *, swa_pages: int) -> None:
        world = EngineWorld(CacheGeometry(4, 8), full_pages=500, swa_pages=swa_pages, max_rows=32)
        self.engine = InlineEngine(world.engine)
        self.registry = CollectorRegistry()
        EngineMetrics(self.engine, self.registry)
        self._next_uid = 0

    async def answer(self, prompt: list[int]) -> None:
        params = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        box = self.engine.submit(Submit(self._next_uid, np.array(prompt, dtype=np.int32), params))
        self._next_uid += 1
        async with asyncio.timeout(PATIENCE_S):
            while (await box.get()).finish is None:
                pass

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"forkpoint_{name}_total", labels)
        assert value is not None, (name, labels)
        return value

    def branch_points(self) -> tuple[float, float, float]:
        found, kept, hit = (self.value("branch_points", event=e) for e in ("found", "kept", "hit"))
        return found, kept, hit


def test_three_requests_that_share_a_prompt_find_keep_and_hit_its_branch_point() -> None:
    async def story() -> None:
        metered = MeteredEngine(swa_pages=200)
        await metered.engine.start()
        await metered.answer(SYSTEM + [101] * 30)
        assert metered.branch_points() == (0, 0, 0)
        assert metered.value("swa_windows", event="rebuilt") == metered.value("rebuilt_tokens") == 0
        kept = metered.value("swa_windows", event="kept")
        assert kept > 0

        await metered.answer(SYSTEM + [102] * 30)
        assert metered.branch_points() == (1, 1, 0)
        assert metered.value("swa_windows", event="rebuilt") == 1
        rebuilt = metered.value("rebuilt_tokens")
        # One SWA layer: its lost window alone, [page_floor(64 - 7), 64).
        assert rebuilt == 64 - 56
        assert metered.value("cached_tokens") == 56
        assert metered.value("swa_windows", event="kept") > kept

        await metered.answer(SYSTEM + [103] * 30)
        assert metered.branch_points() == (1, 1, 1)
        assert metered.value("swa_windows", event="rebuilt") == 1
        assert metered.value("rebuilt_tokens") == rebuilt
        assert metered.value("cached_tokens") == 56 + 64
        assert metered.value("prompt_tokens") == 3 * 94
        assert metered.value("computed_tokens") == 3 * 94 - 56 - 64 - rebuilt
        assert metered.value("swa_windows", event="evicted") == 0
        await metered.engine.stop()

    asyncio.run(story())


def test_windows_that_give_way_are_counted_as_evicted() -> None:
    async def story() -> None:
        metered = MeteredEngine(swa_pages=24)
        await metered.engine.start()
        for salt in range(20):
            await metered.answer([salt] * 40)
        assert metered.value("swa_windows", event="evicted") > 5
        assert metered.value("evicted_slots", kind="swa") > 0
        assert metered.value("evicted_slots", kind="full") == 0
        await metered.engine.stop()

    asyncio.run(story())
