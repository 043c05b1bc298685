"""Anchors, scraps, and eviction by cost: which windows stay, and which go first."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_world import CacheWorld, Running

from forkpoint.cache import CacheGeometry
from forkpoint.cache.eviction_cost import CostWindows, ReuseEstimator
from forkpoint.cache.tree import Node, Root, SwaSpan, Window, WindowClass
from forkpoint.cache.window_order import Appraisal

SYSTEM = list(range(1000, 1200))


def make_world(
    *, window: int = 6, swa: int = 4000, full: int = 8000, page_size: int = 1, **kwargs: str
) -> CacheWorld:
    policies = {"retention": "anchors", "eviction": "cost"} | kwargs
    return CacheWorld(CacheGeometry(page_size, window), full_pages=full, swa_pages=swa, **policies)  # type: ignore[arg-type]


def run(
    world: CacheWorld, tokens: list[int], anchors: tuple[int, ...] = (), *, chunk: int = 10_000
) -> Running:
    running = world.start(tokens, anchors=anchors)
    while running.num_computed < len(tokens):
        assert world.compute(running, chunk)
    return running


def finish(
    world: CacheWorld, tokens: list[int], anchors: tuple[int, ...] = (), *, chunk: int = 10_000
) -> None:
    world.finish(run(world, tokens, anchors, chunk=chunk))


def resume(world: CacheWorld, tokens: list[int]) -> int:
    return world.cache.match(np.array(tokens, dtype=np.int32)).resume_len


def ends(world: CacheWorld) -> dict[int, WindowClass]:
    """End position and class of every kept window."""
    swa = world.cache._swa
    assert swa is not None
    size = world.geometry.page_size
    return {window.end_page * size: window.window_class for window in swa.order.windows()}


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
@pytest.mark.parametrize("eviction", ["cost", "lru"])
def test_the_second_request_of_a_system_prompt_resumes_at_its_anchor(chunk: int, eviction: str) -> None:
    world = make_world(eviction=eviction)
    finish(world, SYSTEM + list(range(60)), (200,), chunk=chunk)
    assert resume(world, SYSTEM + [7, 7]) == 200


def test_message_anchors_stay_a_window_apart_and_clear_of_the_tail() -> None:
    world = make_world(window=20)
    finish(world, list(range(300)), (100, 110, 119, 120, 150, 290))
    assert ends(world) == {
        100: "system_anchor",
        120: "message_anchor",
        150: "message_anchor",
        300: "prompt_tail",
    }


def test_anchors_that_were_cached_already_are_not_kept_again() -> None:
    world = make_world(window=20)
    finish(world, list(range(100)))
    before = ends(world)
    world.finish(run(world, [*range(100), *range(500, 560)], (50,)))
    assert 50 not in ends(world) and set(before) <= set(ends(world))


def test_the_branch_policy_ignores_anchors() -> None:
    world = make_world(retention="branch")
    finish(world, SYSTEM + list(range(60)), (200,))
    assert set(ends(world)) == {260}


def test_pages_given_up_stay_until_memory_is_short() -> None:
    world = make_world(eviction="cost", retention="tail")
    finish(world, SYSTEM + list(range(60)))
    assert resume(world, SYSTEM + [7, 7]) == 200, "scraps complete the window"
    lru = make_world(eviction="lru", retention="tail")
    finish(lru, SYSTEM + list(range(60)))
    assert resume(lru, SYSTEM + [7, 7]) == 0, "freed at once"


def test_resuming_from_scraps_makes_them_a_kept_window() -> None:
    world = make_world(retention="branch")
    finish(world, SYSTEM + list(range(60)))
    finish(world, SYSTEM + [7, 7])
    assert ends(world)[200] == "branch"


def test_scraps_go_before_any_window_and_the_oldest_first() -> None:
    world = make_world(swa=400, retention="anchors")
    finish(world, SYSTEM + list(range(60)), (200,))
    windows = ends(world)
    finish(world, list(range(5000, 5300)))
    assert set(windows) <= set(ends(world)), "no window fell while there were scraps"
    assert world.cache.counters.windows_evicted == 0
    assert resume(world, SYSTEM[:100] + [7]) == 0, "the oldest scraps are gone"
    assert resume(world, [*range(5000, 5250), 7]) == 250, "the newest are there"


def test_one_shot_tails_fall_before_the_window_that_everybody_uses() -> None:
    world = make_world(swa=420, window=20)
    finish(world, SYSTEM + list(range(60)), (200,))
    for request in range(40):
        finish(world, SYSTEM + [request] * 50, (200,))
        assert resume(world, SYSTEM + [99_999]) == 200
    assert world.cache.counters.windows_evicted > 10
    lru = make_world(swa=420, window=20, eviction="lru")
    finish(lru, SYSTEM + list(range(60)), (200,))
    for request in range(12):
        finish(lru, list(range(9000 + 300 * request, 9300 + 300 * request)))
    assert resume(lru, SYSTEM + [99_999]) == 0


def test_a_prefill_without_eviction_ends_where_free_pages_and_scraps_end() -> None:
    world = make_world(swa=400, window=20)
    finish(world, SYSTEM + list(range(60)), (200,))
    swa = world.cache._swa
    assert swa is not None
    running = world.start(list(range(5000, 5390)))
    cheap = world.cache.max_end_without_eviction(running.lease)
    assert cheap == swa.pool.num_free + swa.num_scrap_pages < world.cache.max_end(running.lease) == 400
    world.compute(running, cheap)
    assert world.cache.counters.windows_evicted == 0


# ---- the order by itself


def window(window_class: WindowClass, hits: int = 0) -> Window:
    empty = np.zeros(0, dtype=np.int32)
    node = Node(Root(""), 0, empty, empty, SwaSpan.dead(0))
    return Window(node, 1, 1, window_class, hits)


class Market:
    """Worths and a clock that a test sets."""

    def __init__(self) -> None:
        self.worth: dict[int, Appraisal] = {}
        self.time = 0
        self.order = CostWindows(1000)
        self.order.bind(lambda window: self.worth[id(window)], lambda: self.time)

    def add(self, window_class: WindowClass, *, cost: int, freed: int = 10) -> Window:
        made = window(window_class)
        self.worth[id(made)] = Appraisal(freed, cost)
        self.order.keep(made)
        return made

    def victims(self) -> list[Window]:
        return list(self.order.victims())


def test_cheap_to_rebuild_goes_first() -> None:
    market = Market()
    dear, cheap = market.add("branch", cost=9000), market.add("branch", cost=100)
    assert market.victims() == [cheap, dear]
    assert market.victims() == [cheap, dear], "looking changes nothing"


def test_pages_that_are_really_freed_count() -> None:
    market = Market()
    small, large = market.add("branch", cost=100, freed=2), market.add("branch", cost=100, freed=200)
    assert market.victims() == [large, small]


def test_age_halves_a_window_s_worth() -> None:
    market = Market()
    old = market.add("branch", cost=300)
    market.time = 2500  # one half-life of two and a half pools
    new = market.add("branch", cost=200)
    assert market.victims() == [old, new]


def test_worth_that_changed_is_seen_when_the_window_comes_up() -> None:
    market = Market()
    first, second = market.add("branch", cost=100), market.add("branch", cost=200)
    assert market.victims() == [first, second]
    market.worth[id(first)] = Appraisal(10, 5000)
    assert market.victims() == [second, first]


def test_windows_may_be_dropped_while_they_are_offered() -> None:
    market = Market()
    made = [market.add("branch", cost=cost) for cost in (1, 2, 3, 4)]
    for victim in market.order.victims():
        market.order.forget(victim, is_evicted=True)
        if victim is made[1]:
            break
    assert market.victims() == made[2:]


def test_reuse_is_learned_per_class_and_hits() -> None:
    estimator = ReuseEstimator()
    before = estimator.expected_reuse(window("branch"))
    for _ in range(20):
        estimator.note_hit(window("branch"))
        estimator.note_eviction(window("finish_tail"))
    assert estimator.expected_reuse(window("branch")) > 0.85 > before
    assert estimator.expected_reuse(window("finish_tail")) < 0.1
    assert estimator.expected_reuse(window("branch", hits=1)) == pytest.approx(0.7)


def test_the_first_hit_of_a_tail_demotes_it() -> None:
    estimator = ReuseEstimator()
    assert estimator.expected_reuse(window("prompt_tail", hits=1)) < estimator.expected_reuse(
        window("prompt_tail")
    )
