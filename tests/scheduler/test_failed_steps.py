"""What a step that raises leaves behind: its requests end, and damaged state serves nobody."""

from __future__ import annotations

import pytest
from support.engine_world import EngineWorld

from forkpoint.cache import CacheGeometry


def world_that_fails_next(error: Exception) -> EngineWorld:
    """A finished request of 100 tokens in the cache; the next step raises `error`."""
    world = EngineWorld(CacheGeometry(4, 16), full_pages=200, swa_pages=100, max_rows=64)
    world.submit(list(range(100)), 5)
    world.run()
    real_step = world.runner.step

    def raise_once(*_: object) -> object:
        world.runner.step = real_step  # type: ignore[method-assign]
        raise error

    world.runner.step = raise_once  # type: ignore[method-assign, assignment]
    return world


@pytest.mark.parametrize(
    ("error", "is_kept"), [(FloatingPointError("logits are nan"), False), (RuntimeError("no"), True)]
)
def test_cached_state_is_given_up_when_logits_show_that_it_may_be_damaged(
    error: Exception, is_kept: bool
) -> None:
    world = world_that_fails_next(error)
    uid = world.submit([*range(100), 7], 5)
    report = world.engine.step()
    assert [finish.reason for finish in report.finished] == ["error"]
    world.stories[uid].finish = report.finished[0]
    assert (world.cache.full_use.tree > 0) == is_kept
    after = world.stories[world.submit([*range(100), 8], 5)]
    world.run()
    assert after.cached_tokens is not None and (after.cached_tokens > 0) == is_kept
    world.finish_all()


def test_a_failed_step_leaves_the_state_of_sequences_that_it_did_not_run() -> None:
    world = world_that_fails_next(FloatingPointError("logits are nan"))
    failed = world.submit(list(range(200, 300)), 5)
    waiting = world.submit(list(range(200, 300)), 5)  # follows the first
    report = world.engine.step()
    assert [finish.uid for finish in report.finished] == [failed]
    world.stories[failed].finish = report.finished[0]
    world.run()
    assert len(world.stories[waiting].tokens) == 5
    world.finish_all()
