"""What an eviction costs depends on what it evicts, not on how much is cached."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest
from support.cache_world import CacheWorld

from forkpoint.cache import CacheGeometry, Lease, PrefixCache
from forkpoint.cache.eviction_cost import CostWindows
from forkpoint.configs.staircase import Staircase

GROUP, LEAF, WINDOW = 64, 16, 8


def forest(num_leaves: int, *, full_pages: int, swa_pages: int, eviction: str) -> PrefixCache:
    """Ten prompts share each group's GROUP tokens and end in LEAF of their own."""
    cache = PrefixCache(
        CacheGeometry(1, WINDOW),
        full_pages=full_pages,
        swa_pages=swa_pages,
        retention="anchors",
        eviction=eviction,
        staircase=Staircase("SF", WINDOW, 1),
    )
    random = np.random.default_rng(3)
    for index in range(num_leaves):
        if index % 10 == 0:
            group = random.integers(0, 1 << 20, GROUP, dtype=np.int32)
        prompt = np.concatenate([group, random.integers(0, 1 << 20, LEAF, dtype=np.int32)])
        lease = cache.acquire(cache.match(prompt), prompt_len=len(prompt))
        cache.extend(lease, len(prompt))
        cache.release(lease, prompt, len(prompt))
    return cache


def take_all_free(cache: PrefixCache, num_pages: int) -> Lease:
    lease = cache.acquire(cache.match(np.zeros(1, dtype=np.int32)), prompt_len=1)
    cache.extend(lease, num_pages)
    return lease


def calls_of_extend(cache: PrefixCache, lease: Lease, end: int) -> int:
    """Calls of functions, Python's and C's, that taking pages makes; the same number on any machine."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        cache.extend(lease, end)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("eviction", ["cost", "lru"])
def test_evicting_full_pages_costs_the_same_among_100_and_5000_leaves(eviction: str) -> None:
    calls = []
    for num_leaves in (100, 5000):
        tree_pages = num_leaves // 10 * GROUP + num_leaves * LEAF
        cache = forest(num_leaves, full_pages=tree_pages + 64, swa_pages=1 << 18, eviction=eviction)
        free = cache.full_use.free
        lease = take_all_free(cache, free)
        calls.append(calls_of_extend(cache, lease, free + 1024))
        assert cache.counters.evicted_full_slots >= 1024
    assert calls[1] <= calls[0] * 1.1, "1,024 pages are 64 leaves in either forest"


@pytest.mark.parametrize("eviction", ["cost", "lru"])
@pytest.mark.parametrize("num_pages", [1, 200])
def test_evicting_windows_costs_the_same_among_100_and_2000(num_pages: int, eviction: str) -> None:
    """The first eviction ever too: a decode step must not pay for all windows that were kept before it."""
    calls = []
    for num_leaves in (100, 2000):
        cache = forest(num_leaves, full_pages=1 << 20, swa_pages=1 << 18, eviction=eviction)
        swa = cache._swa
        assert swa is not None
        lease = take_all_free(cache, swa.pool.num_free + swa.num_scrap_pages)
        kept = cache.counters.windows_evicted
        end = lease.swa_pages.length + num_pages
        calls.append(calls_of_extend(cache, lease, end))
        assert cache.counters.windows_evicted > kept == 0
    assert calls[1] <= calls[0] * 1.1


def test_one_decode_token_in_a_tight_pool_is_cheap_beside_1000_windows() -> None:
    cache = forest(1000, full_pages=1 << 20, swa_pages=1 << 18, eviction="cost")
    swa = cache._swa
    assert swa is not None
    lease = take_all_free(cache, swa.pool.num_free + swa.num_scrap_pages)
    end = lease.swa_pages.length
    calls = [calls_of_extend(cache, lease, token) for token in range(end + 1, end + 201)]
    assert max(calls) < 2000
    assert sum(calls) / len(calls) < 150


def test_hits_without_eviction_do_not_pile_up() -> None:
    world = CacheWorld(CacheGeometry(1, 6), full_pages=4000, swa_pages=4000, eviction="cost")
    prompt = list(range(40))
    for token in range(300):
        running = world.start([*prompt, 1000 + token % 3])
        world.compute(running, 100)
        world.finish(running)
    order = world.cache._swa.order if world.cache._swa is not None else None
    assert isinstance(order, CostWindows)
    assert len(order._heap) <= 2 * len(order._windows) + 65
