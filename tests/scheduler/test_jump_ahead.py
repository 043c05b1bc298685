"""A prefill in progress that takes over what a neighbour computed: what it costs, and what is told of it."""

from __future__ import annotations

import pytest
from support.engine_world import EngineWorld

from forkpoint.cache import CacheGeometry
from forkpoint.scheduler import arrivals


def prompt(start: int, length: int) -> list[int]:
    return [start * 1000 + index for index in range(length)]


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prefills are admitted; the first takes all SWA pages for its chunks, so that the second stalls."""
    monkeypatch.setattr(arrivals, "is_computed_by", lambda *_: False)


def two_that_share(length: int, *, anchors: tuple[int, ...] = (), **kwargs: object) -> EngineWorld:
    """The first prompt has 910 tokens, the second `length` of them and 10 more."""
    options = {"full_pages": 2000, "swa_pages": 100, "max_rows": 1000, "pattern": "SFSS"} | kwargs
    world = EngineWorld(CacheGeometry(4, 16), **options)  # type: ignore[arg-type]
    world.submit(prompt(0, 900) + prompt(1, 10), 5, anchors=anchors)
    world.submit(prompt(0, length) + prompt(2, 10), 5)
    world.step()
    assert world.scheduler.num_running == 2 and world.stories[1].cached_tokens == 0
    return world


def test_usage_tells_of_what_a_jump_spared() -> None:
    world = two_that_share(900)
    world.run()
    story, stats = world.stories[1], world.engine.stats()
    assert story.cached_tokens == stats.cached_tokens > 700
    assert story.rebuilt_tokens == stats.rebuilt_tokens
    world.finish_all()


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_a_jump_never_goes_back(eviction: str) -> None:
    # The window at 400, from which the second resumes, is held by nobody else once the first is past it.
    world = two_that_share(440, eviction=eviction, retention="tail")
    last_lease, reached, num_jumps = None, 0, 0
    while world.engine.has_work:
        world.step()
        for sequence in world.scheduler.running:
            if sequence.uid == 1 and sequence.lease is not last_lease:
                assert sequence.lease is not None
                assert sequence.lease.start >= reached, "its own window was gone when it was borrowed"
                last_lease, num_jumps = sequence.lease, num_jumps + 1
            if sequence.uid == 1:
                reached = sequence.num_computed
    assert num_jumps > 1, "nothing was tested"
    world.finish_all()


def test_without_rebuilds_a_jump_counts_the_gap_as_computed() -> None:
    world = two_that_share(610, anchors=(560,), rebuilds=False, retention="anchors")
    world.run()
    assert world.stories[1].rebuilt_tokens == 0
    assert world.engine.stats().rebuilt_tokens == 0
    world.finish_all()
