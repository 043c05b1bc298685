"""The cache against a brute-force oracle: hypothesis drives every verb, audit() runs after each."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.cache_world import CacheWorld, Running, random_step, random_world

from forkpoint.cache import CacheGeometry

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


class CacheMachine(RuleBasedStateMachine):
    """Random interleavings of start, compute, decode, finish and flush; shrinks to a small story."""

    world: CacheWorld

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 5, 16]),
        window=st.sampled_from([None, 1, 2, 4, 6, 9]),
        full_pages=st.integers(20, 80),
        spare_swa_pages=st.integers(1, 40),
        retention=st.sampled_from(["branch", "tail"]),
    )
    def make(
        self, page_size: int, window: int | None, full_pages: int, spare_swa_pages: int, retention: str
    ) -> None:
        geometry = CacheGeometry(page_size, window)
        resting = geometry.max_resting_swa_tokens() // page_size + 1
        self.world = CacheWorld(
            geometry, full_pages=full_pages, swa_pages=resting + spare_swa_pages, retention=retention
        )

    @precondition(lambda self: len(self.world.running) < 5)
    @rule(
        source=st.integers(0, 50),
        cut=st.integers(0, 60),
        tail=TOKENS,
        namespace=st.sampled_from(["", "", "a"]),
    )
    def start(self, source: int, cut: int, tail: list[int], namespace: str) -> None:
        base, _ = self.world.seen[source % len(self.world.seen)]
        self.world.start(base[:cut] + tail, namespace)

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 4), rows=st.integers(1, 40), token=st.integers(0, 2))
    def compute(self, which: int, rows: int, token: int) -> None:
        running = self.world.running[which % len(self.world.running)]
        self.world.append(running, token)
        self.world.compute(running, rows)

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 4))
    def finish(self, which: int) -> None:
        self.world.finish(self.world.running[which % len(self.world.running)])

    @rule()
    def flush(self) -> None:
        self.world.flush()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_keep_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(rng)
    for _ in range(100):
        random_step(world, rng)
    world.drain()


@pytest.mark.parametrize(
    ("seed", "fault"),
    [
        (7, "a window of one position borrows no page"),
        (143, "scraps above a leaf that was evicted since were never reclaimed"),
    ],
)
def test_seeds_that_once_found_a_fault(seed: int, fault: str) -> None:
    rng = random.Random(seed)
    world = random_world(rng)
    for _ in range(250):
        random_step(world, rng)
    world.drain()


def test_scraps_above_an_evicted_leaf_can_still_be_reclaimed() -> None:
    world = CacheWorld(CacheGeometry(1, 4), full_pages=150, swa_pages=120, retention="tail", eviction="cost")
    # The prompt's scraps are remembered at its leaf; a fork cuts the leaf, and full pressure evicts the rest.
    world.finish(_prefilled(world, list(range(100))))
    world.finish(_prefilled(world, [*range(50), 777]))
    world.finish(_prefilled(world, list(range(500, 560))))
    swa = world.cache.swa_use
    assert swa is not None
    running = _prefilled(world, list(range(900, 1000)))
    world.finish(running)
    world.drain()


def _prefilled(world: CacheWorld, tokens: list[int]) -> Running:
    running = world.start(tokens)
    while running.num_computed < len(tokens):
        assert world.compute(running, 40)
    return running
