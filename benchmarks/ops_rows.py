"""The operations that are timed, by the names under which the reference's numbers are filed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import cycle
from statistics import median

import numpy as np
from ops_timing import each_us, loop_us
from ops_worlds import (
    CHUNK,
    FOREST_TOKENS,
    Forest,
    Tokens,
    World,
    ample_world,
    chain,
    fill,
    forest,
    replay_us,
)

from forkpoint.cache import Lease
from forkpoint.scheduler.trace_pools import PoolSlots, ample_pools, tight_pools
from forkpoint.scheduler.traces import Workload, WorkloadKind

Operation = Callable[[int], float]  # page size -> microseconds


def match_one_prompt(length: int, page_size: int) -> float:
    """One prompt, inserted as a finished request leaves it: one node here, two or three in the reference."""
    world = ample_world(page_size)
    prompt = world.tokens(length)
    world.finish(prompt)
    return _match_us(world, [prompt])


def match_chain(length: int, page_size: int) -> float:
    world = ample_world(page_size)
    return _match_us(world, [chain(world, length)])


def lock_and_unlock(length: int, page_size: int) -> float:
    """What the reference's lock and unlock do: protect a path and its last window from eviction, and undo."""
    world = ample_world(page_size)
    follow_up = _longer(world, chain(world, length))
    match = world.cache.match(follow_up)
    full, swa, tip = world.cache._full, world.cache._swa, match.path[-1]
    assert swa is not None
    end = match.resume_len // page_size
    start = end - world.cache.geometry.pages_to_resume

    def lock_and_undo() -> None:
        full.pin(tip)
        swa.lock(tip, start, end)
        swa.unlock(tip, start, end)
        full.unpin(tip)

    return loop_us(lock_and_undo, num_calls=200)


def acquire_and_release(length: int, page_size: int) -> float:
    """More than to lock and to unlock: the lease gets its page tables, and the order of use is brought up."""
    world = ample_world(page_size)
    follow_up = _longer(world, chain(world, length))
    cache = world.cache

    def borrow() -> None:
        lease = cache.acquire(cache.match(follow_up), prompt_len=len(follow_up))
        cache.release(lease, follow_up, lease.start)

    match_us = loop_us(lambda: cache.match(follow_up), num_calls=200)
    return loop_us(borrow, num_calls=50) - match_us


def insert_fresh(length: int, page_size: int) -> float:
    world = ample_world(page_size)
    return _commit_us(world, lambda: world.tokens(length))


def forest_match(length: int, page_size: int) -> float:
    grown = _forest(page_size)
    if length == 1152:
        return _match_us(grown.world, _sample(grown))
    prompt = grown.world.tokens(length)
    grown.world.finish(prompt)
    return _match_us(grown.world, [prompt])


def forest_miss(page_size: int) -> float:
    world = _forest(page_size).world
    return _match_us(world, [world.tokens(1152) for _ in range(50)])


def forest_insert(page_size: int) -> float:
    grown = _forest(page_size)
    prompts = iter(_sample(grown))
    return _commit_us(grown.world, lambda: np.concatenate([next(prompts), grown.world.tokens(128)]))


def forest_build(page_size: int) -> float:
    return _forest(page_size).build_us


def evict_full(num_tokens: int, page_size: int) -> float:
    return _evict_us(num_tokens, page_size, PoolSlots(FOREST_TOKENS, 4 * FOREST_TOKENS), "cost")


def evict_swa(eviction: str, num_tokens: int, page_size: int) -> float:
    return _evict_us(num_tokens, page_size, PoolSlots(4 * FOREST_TOKENS, FOREST_TOKENS), eviction)


def replay(kind: WorkloadKind, page_size: int) -> float:
    """Per request, as the reference: one at a time, median over both windows and both pools."""
    workload = Workload(kind, num_requests=16 if kind == "chat" else 64)
    requests = workload.requests()
    found = []
    for window in (128, 512):
        tight = tight_pools(workload, page_size=page_size, window=window, chunk=CHUNK, concurrency=1)
        for slots in (ample_pools(requests, page_size=page_size, chunk=CHUNK), tight):
            found.append(replay_us(requests, World(page_size, slots, window=window)))
    return median(found)


OPERATIONS: dict[str, Operation] = {
    "match, hit, 4,096 tokens, 3-node path": partial(match_one_prompt, 4096),
    "match, hit, 32,768 tokens, 2-node path": partial(match_one_prompt, 32768),
    "match, hit, 4,096 tokens, 16-node chain": partial(match_chain, 4096),
    "match, hit, 32,768 tokens, 128-node chain": partial(match_chain, 32768),
    "lock + unlock, 16-node chain": partial(lock_and_unlock, 4096),
    "lock + unlock, 128-node chain": partial(lock_and_unlock, 32768),
    "acquire + release, 16-node chain": partial(acquire_and_release, 4096),
    "acquire + release, 128-node chain": partial(acquire_and_release, 32768),
    "insert, fresh 4,096 tokens": partial(insert_fresh, 4096),
    "insert, fresh 32,768 tokens": partial(insert_fresh, 32768),
    "match, hit, 1,152 tokens, 10k-node forest": partial(forest_match, 1152),
    "match, miss, 10k-node forest": forest_miss,
    "match, hit, 4,096 tokens, 10k-node forest": partial(forest_match, 4096),
    "match, hit, 32,768 tokens, 10k-node forest": partial(forest_match, 32768),
    "insert, 1,152 shared + 128 new, 10k-node forest": forest_insert,
    "match + alloc + insert per prompt while building the forest": forest_build,
    "evict 1,024 SWA tokens, tree only, 10k-node forest": partial(evict_swa, "lru", 1024),
    "evict 16,384 SWA tokens, tree only, 10k-node forest": partial(evict_swa, "lru", 16384),
    "evict 1,024 SWA tokens by cost": partial(evict_swa, "cost", 1024),
    "evict 16,384 SWA tokens by cost": partial(evict_swa, "cost", 16384),
    "evict 1,024 Full tokens, tree only, 10k-node forest": partial(evict_full, 1024),
    "evict 16,384 Full tokens, tree only, 10k-node forest": partial(evict_full, 16384),
    "all cache work per request, shared 2048": partial(replay, "shared"),
    "all cache work per request, groups 2048": partial(replay, "groups"),
    "all cache work per request, chat 2048": partial(replay, "chat"),
}


def _match_us(world: World, prompts: list[Tokens]) -> float:
    """One match of a prompt's follow-up, which hits all of the prompt."""
    follow_ups = cycle([_longer(world, prompt) for prompt in prompts])
    return loop_us(lambda: world.cache.match(next(follow_ups)), num_calls=400)


def _commit_us(world: World, make: Callable[[], Tokens]) -> float:
    """What follows a prefill: insert, adopt, keep a window, let go of what left it."""
    open_lease: list[tuple[Lease, Tokens]] = []

    def prepare() -> tuple[Lease, Tokens]:
        for lease, tokens in open_lease:
            world.cache.release(lease, tokens, len(tokens))
        tokens = make()
        open_lease[:] = [(world.prefilled(tokens), tokens)]
        return open_lease[0]

    return each_us(prepare, lambda made: world.cache.commit(made[0], made[1], len(made[1])))


def _evict_us(num_tokens: int, page_size: int, slots: PoolSlots, eviction: str) -> float:
    """Median of the calls that drain half of the forest, the taking of the freed pages included."""
    grown = forest(page_size, slots, eviction=eviction)
    cache = grown.world.cache
    idle = fill(grown.world)
    taken = idle.full_pages.length * page_size
    ends: Iterator[int] = iter(range(taken + num_tokens, taken + FOREST_TOKENS, num_tokens))
    use = cache.full_use if slots.full < slots.swa else cache.swa_use
    assert use is not None and use.free == 0
    num_calls = use.tree * page_size // 2 // num_tokens
    return each_us(lambda: next(ends), lambda end: cache.extend(idle, end), num_calls=num_calls)


@lru_cache(maxsize=1)
def _forest(page_size: int) -> Forest:
    """The forest for everything that does not shrink it; several rows share it."""
    return forest(page_size, PoolSlots(4 * FOREST_TOKENS, 4 * FOREST_TOKENS))


def _sample(grown: Forest) -> list[Tokens]:
    order = np.random.default_rng(2).permutation(len(grown.prompts))[:400]
    return [grown.prompts[index] for index in order]


def _longer(world: World, prompt: Tokens) -> Tokens:
    return np.concatenate([prompt, world.tokens(16)])
