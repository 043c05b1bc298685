"""What a request finds in the cache after others: hits, gaps, branch points, windows, eviction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.cache_world import CacheWorld, Running

from forkpoint.cache import CacheGeometry, OutOfPages, PrefixCache


def make_world(
    page_size: int = 1, window: int | None = 6, full: int = 4000, swa: int = 4000, **kwargs: object
) -> CacheWorld:
    return CacheWorld(CacheGeometry(page_size, window), full_pages=full, swa_pages=swa, **kwargs)  # type: ignore[arg-type]


def run_prompt(
    world: CacheWorld, tokens: list[int], chunk: int = 10_000, decode: int = 0, namespace: str = ""
) -> Running:
    running = world.start(tokens, namespace)
    while running.num_computed < len(tokens):
        assert world.compute(running, chunk)
    for token in range(decode):
        world.append(running, 900_000 + token)
        assert world.compute(running, 1)
    return running


def finish_prompt(
    world: CacheWorld, tokens: list[int], *, chunk: int = 10_000, decode: int = 0, namespace: str = ""
) -> None:
    world.finish(run_prompt(world, tokens, chunk, decode, namespace))


def hit(world: CacheWorld, tokens: list[int], namespace: str = "") -> tuple[int, int, int | None]:
    match = world.cache.match(np.array(tokens, dtype=np.int32), namespace)
    return match.resume_len, match.full_len, match.branch_point


SYSTEM = list(range(1000, 1200))


def test_an_unknown_prompt_matches_nothing() -> None:
    world = make_world()
    assert hit(world, [1, 2, 3]) == (0, 0, None)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_same_prompt_leaves_at_least_one_token_to_compute(page_size: int) -> None:
    world = make_world(page_size)
    prompt = list(range(64))
    finish_prompt(world, prompt)
    resume, full, _ = hit(world, prompt)
    assert full == (63 // page_size) * page_size
    assert resume == full, "the margin below the tail's window reaches one page edge lower"


def test_second_request_pays_the_gap_and_the_third_finds_none() -> None:
    world = make_world()
    finish_prompt(world, SYSTEM + list(range(50)), decode=8)
    second = SYSTEM + list(range(100, 150))
    assert hit(world, second) == (0, 200, 200)
    finish_prompt(world, second, decode=8)
    third = SYSTEM + list(range(200, 250))
    assert hit(world, third) == (200, 200, None)
    assert world.cache.counters.branch_points_found == 1
    assert world.cache.counters.branch_points_kept == 1
    finish_prompt(world, third)
    assert world.cache.counters.branch_points_hit == 1


@pytest.mark.parametrize("chunk", [1, 7, 64, 199, 200, 201])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_branch_window_is_kept_whatever_the_chunks(chunk: int, page_size: int) -> None:
    world = make_world(page_size)
    finish_prompt(world, SYSTEM + list(range(50)), chunk=chunk)
    finish_prompt(world, SYSTEM + list(range(100, 150)), chunk=chunk)
    floor = 200 - 200 % page_size
    assert hit(world, SYSTEM + list(range(200, 250)))[:2] == (floor, floor)


@pytest.mark.parametrize("rebuilds", [True, False])
def test_gap_rows_take_no_full_pages(rebuilds: bool) -> None:
    world = make_world(rebuilds=rebuilds)
    finish_prompt(world, SYSTEM + [1] * 30)
    used = world.cache.full_use.free
    running = world.start(SYSTEM + [2, 3])
    rows = 200 - running.num_computed
    world.compute(running, rows - 2)
    assert world.cache.full_use.free == used, "rows of the gap read the tree's full pages"
    world.compute(running, 4)
    assert world.cache.full_use.free == used - 2


@pytest.mark.parametrize("rebuilds", [True, False])
def test_an_aborted_gap_leaves_nothing_behind(rebuilds: bool) -> None:
    world = make_world(rebuilds=rebuilds)
    finish_prompt(world, SYSTEM + [1] * 20)
    before = (world.cache.full_use, world.cache.swa_use, world.cache.dump())
    running = world.start(SYSTEM + [2, 3])
    world.compute(running, 200 - running.num_computed - 1)
    world.finish(running)
    assert (world.cache.full_use, world.cache.swa_use) == before[:2]


def test_a_rebuild_runs_the_windows_below_the_hit_and_no_more() -> None:
    world = make_world(pattern="SFSS")
    finish_prompt(world, SYSTEM + [1] * 30)
    running = world.start(SYSTEM + [2, 3])
    assert (running.lease.resume, running.lease.full_hit) == (0, 200)
    assert running.num_computed == 200 - 3 * 5
    world.compute(running, 100)
    assert hit(world, SYSTEM + [4, 5]) == (200, 200, None)
    swa = world.cache.swa_use
    assert swa is not None
    # Only W - 1 positions below the hit became live, without a margin: one position lower nothing resumes.
    assert hit(world, SYSTEM[:199] + [4, 5])[:2] == (0, 199)


def test_a_rebuild_starts_at_the_resume_point_when_that_is_near() -> None:
    world = make_world(pattern="SFSSSSSS", window=20)
    finish_prompt(world, SYSTEM[:100])
    finish_prompt(world, SYSTEM + [1] * 40)
    running = world.start(SYSTEM + [2, 3])
    assert (running.lease.resume, running.lease.start, running.lease.full_hit) == (100, 100, 200)
    world.compute(running, 300)
    assert hit(world, SYSTEM + [4, 5]) == (200, 200, None)


def test_tail_retention_keeps_no_branch_window() -> None:
    world = make_world(retention="tail")
    for start in (0, 100):
        finish_prompt(world, SYSTEM + list(range(start, start + 50)))
    assert hit(world, SYSTEM + list(range(200, 250))) == (0, 200, 200)


def test_a_follow_up_that_drops_a_few_tokens_still_resumes() -> None:
    world = make_world()
    finish_prompt(world, list(range(100)))
    for dropped in range(17):
        end = 100 - dropped
        assert hit(world, [*range(end), 5555, 5556])[:2] == (end, end)
    assert hit(world, [*range(83), 5555]) == (0, 83, 83), "one more than the margin"


def test_the_window_in_mid_prefill_is_usable_by_a_neighbour() -> None:
    world = make_world()
    running = world.start(list(range(100)))
    world.compute(running, 60)
    assert hit(world, [*range(60), 7]) == (60, 60, None)


def test_a_window_needs_exactly_w_minus_1_live_positions() -> None:
    """A13 of the public reports: a counter that is not reset at a tombstone would accept a broken window."""
    world = make_world(window=4)
    cache = world.cache
    finish_prompt(world, list(range(12)))
    node = next(iter(cache._tree.recency))
    for start, end, expected in [(0, 4, 12), (6, 10, 0)]:
        node.swa.pages[start:end] = 0
        assert hit(world, [*range(12), 99])[0] == expected
    node.swa.pages[9] = 77
    assert hit(world, [*range(12), 99])[0] == 12
    node.swa.pages[10] = 0
    node.swa.pages[3] = 78
    assert hit(world, [*range(12), 99])[0] == 6, "positions 3, 4 and 5 are live"


def test_page_larger_than_window() -> None:
    """C9 of the public reports: the last page of the prompt keeps its SWA state."""
    world = make_world(page_size=8, window=4)
    finish_prompt(world, list(range(17)))
    assert hit(world, [*range(16), 99]) == (16, 16, None)


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize(("page_size", "window"), [(8, 4), (8, 9), (16, 2), (32, 4), (32, 33)])
def test_every_prompt_resumes_at_its_last_page_edge_even_when_pages_exceed_the_window(
    page_size: int, window: int, chunk: int
) -> None:
    """C9 where no margin helps: a frontier that is rounded up to the last page edge would leave nothing."""
    for length in range(page_size + 1, 3 * page_size + 2):
        world = make_world(page_size, window, full=10, swa=10)
        prompt = list(range(length))
        finish_prompt(world, prompt, chunk=chunk)
        edge = (length - 1) // page_size * page_size
        assert hit(world, [*prompt[:-1], 777]) == (edge, edge, None)
        assert hit(world, [*prompt[:edge], 777, 778]) == (edge, edge, None)


def test_decode_holds_a_bounded_window() -> None:
    world = make_world(page_size=4, window=32)
    finish_prompt(world, list(range(300)), decode=500)


def test_decode_gives_back_the_borrowed_prefix_window_page_by_page() -> None:
    world = make_world(window=20)
    finish_prompt(world, list(range(100)))
    running = run_prompt(world, [*range(100), 7, 8])
    swa = world.cache.swa_use
    assert swa is not None and swa.locked > 0
    for token in range(60):
        world.append(running, token)
        world.compute(running, 1)
    swa = world.cache.swa_use
    assert swa is not None and swa.locked == 0


def test_neighbours_that_compute_the_same_prompt_share_one_copy() -> None:
    world = make_world(page_size=4)
    first, second = world.start(list(range(100))), world.start(list(range(100)))
    for _ in range(4):
        world.compute(first, 25)
        world.compute(second, 25)
    assert world.cache.full_use.tree == 25
    assert world.cache.full_use.leased == 0


def test_namespaces_never_share() -> None:
    world = make_world()
    finish_prompt(world, list(range(50)), namespace="salt:s")
    assert hit(world, [*range(50), 1], "salt:s")[0] == 50
    assert hit(world, [*range(50), 1], "salt:t") == (0, 0, None)
    assert hit(world, [*range(50), 1]) == (0, 0, None)


def test_swa_shortage_evicts_windows_and_no_full_state() -> None:
    world = make_world(window=6, swa=60)
    finish_prompt(world, list(range(30)))
    finish_prompt(world, list(range(500, 530)))
    running = run_prompt(world, list(range(900, 950)))
    assert world.cache.counters.evicted_swa_slots > 0
    assert world.cache.counters.evicted_full_slots == 0
    assert hit(world, [*range(30), 1])[:2] == (0, 30)
    world.finish(running)


def test_full_shortage_evicts_the_least_recently_used_leaf_first() -> None:
    world = make_world(full=100)
    finish_prompt(world, list(range(40)))
    finish_prompt(world, list(range(500, 540)))
    finish_prompt(world, [*range(40), 7])
    finish_prompt(world, list(range(900, 930)))
    assert hit(world, [*range(500, 540), 1])[1] == 0
    assert hit(world, [*range(40), 7, 8])[0] >= 40


def test_what_a_running_sequence_borrowed_is_never_evicted() -> None:
    world = make_world(full=100, swa=100)
    finish_prompt(world, list(range(50)))
    running = world.start([*range(50), 1, 2])
    world.compute(running, 10)
    other = world.start(list(range(500, 600)))
    assert not world.compute(other, 100)
    assert world.compute(other, 40)
    world.compute(running, 10)


def test_extend_takes_nothing_when_either_kind_is_short() -> None:
    cache = PrefixCache(CacheGeometry(1, 4), full_pages=100, swa_pages=30)
    lease = cache.acquire(cache.match(np.arange(50, dtype=np.int32)), prompt_len=50)
    with pytest.raises(OutOfPages, match="swa pool: 50 pages wanted, 30 available") as caught:
        cache.extend(lease, 50)
    assert caught.value.kind == "swa"
    assert cache.full_use.free == 100


def test_a_disabled_cache_publishes_nothing_and_leaks_nothing() -> None:
    world = CacheWorld(CacheGeometry(4, 6), full_pages=100, swa_pages=100, enabled=False)
    finish_prompt(world, list(range(50)), decode=20)
    assert hit(world, list(range(50))) == (0, 0, None)
    world.assert_all_free()


def test_namespaces_that_hold_nothing_are_forgotten() -> None:
    world = make_world(full=60)
    for salt in range(30):
        world.finish(run_prompt(world, list(range(40)), namespace=f"salt:{salt}"))
    assert len(world.cache._tree.roots) <= 2


def corrupt_free_list(cache: PrefixCache) -> None:
    cache._full.pool.give(cache._full.pool.take(1))
    cache._full.pool._stack[0] = cache._full.pool._stack[1]


def corrupt_lock(cache: PrefixCache) -> None:
    next(iter(cache._tree.recency)).swa.locks[-1] += 1


def corrupt_pin(cache: PrefixCache) -> None:
    next(iter(cache._tree.recency)).pins += 1


def corrupt_ledger(cache: PrefixCache) -> None:
    cache._full._num_tree_pages += 1


def corrupt_tombstone(cache: PrefixCache) -> None:
    next(iter(cache._tree.recency)).swa.pages[-1] = 0


@pytest.mark.parametrize(
    "corrupt", [corrupt_free_list, corrupt_lock, corrupt_pin, corrupt_ledger, corrupt_tombstone]
)
def test_audit_finds_planted_faults(corrupt: Callable[[PrefixCache], None]) -> None:
    world = make_world()
    finish_prompt(world, list(range(50)))
    world.cache.audit()
    corrupt(world.cache)
    with pytest.raises(AssertionError):
        world.cache.audit()
