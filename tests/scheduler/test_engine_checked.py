"""The real scheduler, cache and page tables under the checking runner: random stories, every step audited."""

from __future__ import annotations

import random

import pytest
from support.checking_runner import StrangerState
from support.engine_world import EngineWorld, random_engine, random_engine_step

from forkpoint.cache import CacheGeometry
from forkpoint.configs.staircase import Staircase
from forkpoint.scheduler import arrivals


@pytest.mark.parametrize("seed", range(30))
def test_random_stories_end_as_a_cold_run_would(seed: int) -> None:
    rng = random.Random(seed)
    world = random_engine(rng)
    for _ in range(120):
        random_engine_step(world, rng)
    world.finish_all()


def prompt(start: int, length: int) -> list[int]:
    return [start * 1000 + index for index in range(length)]


def roomy(page_size: int = 4, window: int | None = 16, max_rows: int = 64, **kwargs: object) -> EngineWorld:
    geometry = CacheGeometry(page_size, window)
    sizes = {"full_pages": 2000, "swa_pages": 1000} | kwargs
    return EngineWorld(geometry, max_rows=max_rows, **sizes)  # type: ignore[arg-type]


def run_with_frontier_raised_by(positions: int) -> None:
    world = roomy(page_size=1, window=40)
    # The cache frees below p - (W - 1) - margin: a smaller W there raises its frontier.
    object.__setattr__(world.geometry, "window", 40 - positions)
    world.submit(prompt(1, 100), 20)
    world.run()


def test_a_page_freed_one_position_too_early_fails_at_that_step() -> None:
    run_with_frontier_raised_by(16)  # uses up the margin and no more
    with pytest.raises(StrangerState, match="not right in its layer"):
        run_with_frontier_raised_by(17)


def test_an_aliased_page_fails_at_that_step() -> None:
    world = roomy()
    first, second = world.submit(prompt(1, 50), 50), world.submit(prompt(2, 50), 50)
    for _ in range(3):
        world.step()
    leases = [sequence.lease for sequence in world.scheduler.running if sequence.uid in (first, second)]
    assert leases[0] is not None and leases[1] is not None
    leases[1].full_pages[3:4][:] = leases[0].full_pages[3:4]
    with pytest.raises(StrangerState, match="full: position 12"):
        world.engine.step()
        assert world.runner.failure is not None
        raise world.runner.failure


def test_the_third_request_of_a_shared_prompt_finds_no_gap() -> None:
    world = roomy(rebuilds=False)
    assert run_four_of_a_system_prompt(world) == [(0, 0), (0, 0), (200, 0), (200, 0)]


def test_the_second_request_of_a_shared_prompt_rebuilds_the_window_and_nothing_else() -> None:
    world = roomy(pattern="SFSS")
    # Page edge 184 is the lowest of 200 - 15; two more SWA layers below the topmost take 15 rows each.
    assert run_four_of_a_system_prompt(world) == [(0, 0), (154, 46), (200, 0), (200, 0)]
    assert world.engine.stats().windows_rebuilt == 1


def run_four_of_a_system_prompt(world: EngineWorld) -> list[tuple[int | None, int | None]]:
    """(cached, rebuilt) of each of four requests that share 200 tokens."""
    stories = []
    for index in range(1, 5):
        stories.append(world.stories[world.submit(prompt(0, 200) + prompt(index, 40), 5)])
        world.run()
    world.finish_all()
    return [(story.cached_tokens, story.rebuilt_tokens) for story in stories]


class LateStaircase(Staircase):
    """Starts each rebuild `late` rows after the formula's first."""

    late = 1

    def first_rows(self, full_hit: int, resume: int) -> tuple[int, ...]:
        first, *above = super().first_rows(full_hit, resume)
        return first + self.late, *(max(first + self.late, row) for row in above)


@pytest.mark.parametrize(("late", "fails"), [(0, False), (1, True)])
def test_a_rebuild_that_starts_one_row_late_fails_at_that_step(late: int, fails: bool) -> None:
    world = roomy(page_size=1, window=4, pattern="SFSFSS")
    stairs = LateStaircase("SFSFSS", 4, 1)
    world.cache.staircase = stairs
    LateStaircase.late = late
    if not fails:
        run_four_of_a_system_prompt(world)
        return
    with pytest.raises(StrangerState, match="not right in its layer"):
        run_four_of_a_system_prompt(world)


@pytest.mark.parametrize("after_steps", [1, 2, 3])
def test_an_abort_in_the_middle_of_a_rebuild_publishes_nothing_of_it(after_steps: int) -> None:
    world = roomy(page_size=1, window=16, max_rows=16, pattern="SFSFSS")
    first = world.submit(prompt(0, 200) + prompt(1, 40), 5)
    world.run()
    assert world.stories[first].finish is not None
    used = (world.cache.full_use, world.cache.swa_use)
    uid = world.submit(prompt(0, 200) + prompt(2, 40), 5)
    for _ in range(after_steps):
        world.step()
    world.abort(uid)
    assert (world.cache.full_use, world.cache.swa_use) == used
    world.finish_all()


def test_several_rebuilds_and_neighbours_run_in_one_batch() -> None:
    world = roomy(page_size=1, window=16, max_rows=512, pattern="SFSFSS")
    for system in range(3):
        world.submit(prompt(system, 200) + prompt(9, 40), 30)
    world.run()
    running = world.submit(prompt(7, 50), 40)
    world.step()
    for system in range(3):
        world.submit(prompt(system, 200) + prompt(8, 20), 5)
    report = world.step()
    assert report.num_decode_rows == 1
    assert len(report.started) == 3 and all(start.rebuilt_tokens > 0 for start in report.started)
    world.run()
    assert len(world.stories[running].tokens) == 40
    world.finish_all()


def test_decode_rows_run_beside_prefill_chunks() -> None:
    world = roomy(max_rows=16)
    world.submit(prompt(1, 10), 40)
    world.step()
    world.submit(prompt(2, 100), 5)
    report = world.step()
    assert (report.num_decode_rows, report.num_prefill_rows) == (1, 12), (
        "15 rows are left, cut to whole pages"
    )
    world.finish_all()


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    world = roomy(full_pages=100, max_rows=512)
    world.submit(prompt(1, 200), 40)
    world.step()
    large, small = world.submit(prompt(2, 300), 5), world.submit(prompt(3, 8), 5)
    while world.stories[large].cached_tokens is None:
        assert world.stories[small].cached_tokens is None
        world.step()
    world.finish_all()


def test_retraction_gives_the_oldest_its_pages_and_resumes_the_newest() -> None:
    world = roomy(full_pages=60, swa_pages=200, max_rows=256)
    uids = [world.submit(prompt(index, 60), 90) for index in range(1, 4)]
    world.run()
    stats = world.engine.stats()
    assert stats.retractions > 0
    assert [len(world.stories[uid].tokens) for uid in uids] == [90, 90, 90]
    assert stats.prompt_tokens == 180, "a retracted prompt is counted once"
    world.finish_all()


def test_a_swa_pool_of_two_windows_plus_a_chunk_serves_sixteen_requests() -> None:
    geometry = CacheGeometry(4, 32)
    pages = (2 * geometry.max_resting_swa_tokens() + 64) // 4
    world = EngineWorld(geometry, full_pages=4000, swa_pages=pages, max_rows=64, max_running=16)
    for index in range(16):
        world.submit(prompt(0, 100) + prompt(index + 1, 50), 20)
    world.run(max_steps=600)
    world.finish_all()


def test_the_smallest_legal_swa_pool_still_serves() -> None:
    geometry = CacheGeometry(4, 32)
    pages = -(-(32 + geometry.margin + 8) // 4)
    world = EngineWorld(geometry, full_pages=4000, swa_pages=pages, max_rows=64)
    for index in range(3):
        world.submit(prompt(index, 150), 10)
    world.run(max_steps=2000)
    world.finish_all()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 8])
def test_abort_in_every_phase_frees_everything(steps_before: int) -> None:
    world = roomy(max_rows=32)
    uid = world.submit(prompt(1, 60), 30)
    for _ in range(steps_before):
        world.step()
    world.abort(uid)
    world.step()
    finish = world.stories[uid].finish
    assert finish is not None and finish.reason == "abort"
    assert world.scheduler.num_running == world.scheduler.num_waiting == 0
    assert world.cache.full_use.leased == 0
    world.finish_all()


def test_abort_of_an_unknown_uid_is_ignored() -> None:
    world = roomy()
    world.scheduler.abort(12345)
    world.finish_all()


def test_stop_tokens_and_length_end_a_sequence() -> None:
    world = roomy()
    every_token = frozenset(range(1000))
    stopped = world.submit(prompt(1, 10), 5, stop_token_ids=every_token)
    counted = world.submit(prompt(2, 10), 5)
    world.run()
    finish = world.stories[stopped].finish
    assert finish is not None and finish.reason == "stop"
    assert len(world.stories[stopped].tokens) == 1
    assert len(world.stories[counted].tokens) == 5


def test_the_context_ends_with_length() -> None:
    world = EngineWorld(CacheGeometry(4, 16), full_pages=200, swa_pages=100, max_rows=64, context_length=30)
    uid = world.submit(prompt(1, 20), 1000)
    world.run()
    assert len(world.stories[uid].tokens) == 10


@pytest.mark.parametrize(
    ("length", "max_tokens", "words"),
    [(400, 1, "400 tokens; the KV pool holds 400"), (100, 400, "500 slots; the KV pool holds 400")],
)
def test_a_request_that_can_never_fit_is_refused_at_once(length: int, max_tokens: int, words: str) -> None:
    world = roomy(full_pages=100)
    uid = world.submit(prompt(1, length), max_tokens)
    report = world.step()
    assert report.finished[0].uid == uid and report.finished[0].reason == "error"
    assert words in str(report.finished[0].message)
    world.finish_all()


def test_a_step_that_fails_ends_its_requests_only() -> None:
    world = roomy()
    broken = world.submit(prompt(1, 10), 5)
    real_step = world.runner.step

    def raise_once(*_: object) -> object:
        world.runner.step = real_step  # type: ignore[method-assign]
        raise RuntimeError("device says no")

    world.runner.step = raise_once  # type: ignore[method-assign, assignment]
    report = world.engine.step()
    assert [finish.reason for finish in report.finished] == ["error"]
    assert "RuntimeError" in str(report.finished[0].message)
    assert report.finished[0].uid == broken
    world.stories[broken].finish = report.finished[0]
    world.submit(prompt(2, 10), 5)
    world.finish_all()


def test_eight_that_arrive_together_compute_their_shared_prompt_once() -> None:
    world = roomy(max_rows=64, pattern="SFSS")
    uids = [world.submit(prompt(0, 192) + prompt(index + 1, 30), 5) for index in range(8)]
    world.run()
    assert world.engine.stats().computed_tokens == 192 + 8 * 30
    assert [reused(world, uid) for uid in uids] == [0, *[192] * 7]
    world.finish_all()


def reused(world: EngineWorld, uid: int) -> int:
    story = world.stories[uid]
    assert story.cached_tokens is not None and story.rebuilt_tokens is not None
    return story.cached_tokens + story.rebuilt_tokens


def test_choices_of_one_prompt_compute_it_once() -> None:
    world = roomy(max_rows=512)
    for choice in range(4):
        world.submit(prompt(0, 200), 5, choice=choice)
    world.run()
    # The last page edge is at 196: the prompt ends at one, and at least one token is computed.
    assert world.engine.stats().computed_tokens == 200 + 3 * 4
    world.finish_all()


def test_a_follower_does_not_block_others_and_keeps_its_place() -> None:
    world = roomy(max_rows=64)
    leader = world.submit(prompt(0, 300), 5)
    follower, stranger = world.submit(prompt(0, 300) + [7], 5), world.submit(prompt(5, 20), 5)
    world.step()
    world.step()
    assert world.stories[leader].cached_tokens == 0
    assert world.stories[follower].cached_tokens is None
    while world.stories[follower].cached_tokens is None:
        world.step()
    assert world.stories[follower].cached_tokens == 300
    assert world.stories[stranger].cached_tokens == 0
    world.finish_all()


def test_a_follower_whose_leader_is_aborted_goes_on_from_what_is_there() -> None:
    world = roomy(max_rows=64)
    leader = world.submit(prompt(0, 300), 5)
    follower = world.submit(prompt(0, 300) + [7], 5)
    world.step()
    world.abort(leader)
    world.step()
    assert world.stories[follower].cached_tokens == 64
    world.finish_all()


def test_a_rebuild_in_flight_is_waited_for() -> None:
    world = roomy(max_rows=16, page_size=1, pattern="SFSFSS")
    world.submit(prompt(0, 200) + prompt(1, 60), 5)
    world.run()
    uids = [world.submit(prompt(0, 200) + prompt(index, 10), 5) for index in (2, 3)]
    world.run()
    assert world.engine.stats().windows_rebuilt == 1
    assert world.stories[uids[0]].rebuilt_tokens != 0
    assert (world.stories[uids[1]].cached_tokens, world.stories[uids[1]].rebuilt_tokens) == (200, 0)
    world.finish_all()


def test_a_prefill_jumps_ahead_to_what_a_neighbour_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody waits, and the first takes all SWA pages for its chunks: the second is admitted and stalls.
    monkeypatch.setattr(arrivals, "is_computed_by", lambda *_: False)
    world = roomy(max_rows=1000, swa_pages=100, pattern="SFSS")
    first, second = (world.submit(prompt(0, 900) + prompt(index, 10), 5) for index in (1, 2))
    world.step()
    assert world.stories[second].cached_tokens == 0 and world.scheduler.num_running == 2
    world.run()
    stats = world.engine.stats()
    assert 920 < stats.computed_tokens < 1100, "without the jump both compute 910"
    assert stats.cached_tokens + stats.rebuilt_tokens == 1820 - stats.computed_tokens
    assert world.stories[first].cached_tokens == 0
    world.finish_all()


def test_everyone_is_served_when_all_share_and_the_pool_is_tight() -> None:
    geometry = CacheGeometry(4, 32)
    pages = (2 * geometry.max_resting_swa_tokens() + 64) // 4
    world = EngineWorld(
        geometry,
        full_pages=2000,
        swa_pages=pages,
        max_rows=64,
        max_running=16,
        retention="anchors",
        eviction="cost",
        pattern="SSF",
    )
    for index in range(16):
        world.submit(prompt(index % 3, 100) + prompt(index + 9, 50), 20, anchors=(100,))
    world.run(max_steps=700)
    world.finish_all()
