"""Caches filled as the reference's micro-benchmarks fill theirs: one prompt, a chain of turns, a forest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache import CacheGeometry, Lease, PrefixCache
from forkpoint.configs.staircase import Staircase
from forkpoint.scheduler.trace_pools import PoolSlots
from forkpoint.scheduler.traces import TraceRequest

Tokens = NDArray[np.int32]
LAYERS = "SSSSSF" * 3
CHUNK = 3072
# Of the forest: prompts of a group share GROUP tokens and end in LEAF of their own.
NUM_GROUPS, GROUP, LEAVES_PER_GROUP, LEAF = 100, 1024, 99, 128
FOREST_TOKENS = NUM_GROUPS * (GROUP + LEAVES_PER_GROUP * LEAF)


class World:
    """A cache with the default policies, and requests that come, run in one chunk and leave.

    Mutable: the cache fills up.
    """

    def __init__(
        self, page_size: int, slots: PoolSlots, *, window: int = 512, eviction: str = "cost"
    ) -> None:
        self.page_size = page_size
        self._random = np.random.default_rng(1)
        self.cache = PrefixCache(
            CacheGeometry(page_size, window),
            full_pages=slots.full // page_size,
            swa_pages=slots.swa // page_size,
            retention="anchors",
            eviction=eviction,
            staircase=Staircase(LAYERS, window, page_size),
        )

    def tokens(self, count: int) -> Tokens:
        """[count] random token ids."""
        return self._random.integers(1000, 1 << 20, count, dtype=np.int32)

    def prefilled(self, tokens: Tokens) -> Lease:
        """A request that was admitted and has pages for its whole prompt; nothing is published yet."""
        lease = self.cache.acquire(self.cache.match(tokens), prompt_len=len(tokens))
        self.cache.extend(lease, len(tokens))
        return lease

    def finish(self, tokens: Tokens) -> None:
        """A request from match to release."""
        self.cache.release(self.prefilled(tokens), tokens, len(tokens))


def ample_world(page_size: int, *, eviction: str = "cost") -> World:
    """Room for all that a workload of single paths inserts."""
    return World(page_size, PoolSlots(1 << 23, 1 << 23), eviction=eviction)


def chain(world: World, length: int) -> Tokens:
    """Prompts of 256, 512, ... `length` tokens, each the last one and more: a path of length / 256 nodes."""
    tokens = world.tokens(length)
    for end in range(256, length + 1, 256):
        world.finish(tokens[:end])
    return tokens


@dataclass(frozen=True, slots=True)
class Forest:
    """A tree of about 10,000 nodes, and the prompts that made it. build_us: of each prompt, the median."""

    world: World
    prompts: list[Tokens]
    build_us: float


def forest(page_size: int, slots: PoolSlots, *, eviction: str = "cost") -> Forest:
    """99 prompts in each of 100 groups, one by one."""
    world = World(page_size, slots, eviction=eviction)
    prompts, spent_us = [], []
    for _ in range(NUM_GROUPS):
        group = world.tokens(GROUP)
        for _ in range(LEAVES_PER_GROUP):
            prompt = np.concatenate([group, world.tokens(LEAF)])
            start = time.thread_time_ns()
            world.finish(prompt)
            spent_us.append((time.thread_time_ns() - start) / 1000)
            prompts.append(prompt)
    return Forest(world, prompts, median(spent_us))


def fill(world: World) -> Lease:
    """A request that takes every free page of both kinds, so that whatever it takes next is evicted first."""
    lease = world.cache.acquire(world.cache.match(world.tokens(1)), prompt_len=1)
    swa = world.cache.swa_use
    assert swa is not None
    world.cache.extend(lease, min(world.cache.full_use.free, swa.free) * world.page_size)
    return lease


def replay_us(requests: list[TraceRequest], world: World) -> float:
    """Microseconds per request of every call to the cache, one request at a time."""
    sequences = [(request, request.computed_tokens) for request in requests]
    start = time.thread_time_ns()
    for request, tokens in sequences:
        _run_alone(world.cache, request, tokens)
    return (time.thread_time_ns() - start) / len(requests) / 1000


def _run_alone(cache: PrefixCache, request: TraceRequest, tokens: Tokens) -> None:
    """What the scheduler asks of the cache for a request that runs alone: chunks, then a step per token."""
    prompt_len = len(request.prompt)
    match = cache.match(request.prompt)
    cache.pages_to_lock(match)
    lease = cache.acquire(match, prompt_len=prompt_len, anchors=request.anchors)
    computed = lease.start
    while computed < prompt_len:
        end = min(computed + CHUNK, prompt_len, cache.max_end(lease))
        end = max(min(end, computed + 1024), min(end, cache.max_end_without_eviction(lease)))
        cache.extend(lease, end)
        cache.commit(lease, tokens, end)
        computed = end
    for end in range(prompt_len + 1, len(tokens) + 1):
        cache.extend(lease, end)
        cache.advance(lease, end)
    cache.release(lease, tokens, len(tokens))
