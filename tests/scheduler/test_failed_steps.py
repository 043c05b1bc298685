"""What a failed step and a damaged row take with them: their own requests, and what may be damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.engine_world import EngineWorld

from forkpoint.cache import CacheGeometry
from forkpoint.model.inputs import Draws, ForwardInput
from forkpoint.model.outputs import RowFault, StepOutput
from forkpoint.scheduler.engine import MAX_FAILED_STEPS, EngineBroken
from forkpoint.scheduler.messages import StepTokens

Step = Callable[[ForwardInput, Draws], StepOutput]


def warm_world() -> EngineWorld:
    """A world with a prompt of 100 tokens in the cache."""
    world = EngineWorld(CacheGeometry(4, 16), full_pages=200, swa_pages=100, max_rows=64)
    world.submit(list(range(100)), 5)
    world.run()
    return world


def run_step_with(world: EngineWorld, step: Step) -> StepTokens:
    """One step of the engine in which the runner does what `step` does."""
    real_step = world.runner.step
    world.runner.step = step  # type: ignore[assignment, method-assign]
    try:
        report = world.engine.step()
    finally:
        world.runner.step = real_step  # type: ignore[method-assign]
    for uid, token in zip(report.uids, report.tokens, strict=True):
        world.stories[uid].tokens.append(token)
    for start in report.started:
        world.stories[start.uid].cached_tokens = start.cached_tokens
    for finish in report.finished:
        world.stories[finish.uid].finish = finish
    world.check()
    return report


def damaging(world: EngineWorld, row: int) -> Step:
    """A step that finds the logits of one sample row damaged."""
    real_step = world.runner.step

    def step(inputs: ForwardInput, draws: Draws) -> StepOutput:
        return replace(real_step(inputs, draws), faults={row: RowFault.DAMAGED})

    return step


def raising(_: ForwardInput, __: Draws) -> StepOutput:
    raise RuntimeError("device says no")


def test_a_step_that_raises_keeps_the_cached_state() -> None:
    world = warm_world()
    world.submit([*range(100), 7], 5)
    report = run_step_with(world, raising)
    assert [finish.reason for finish in report.finished] == ["error"]
    assert world.cache.full_use.tree > 0
    after = world.stories[world.submit([*range(100), 8], 5)]
    world.run()
    assert after.cached_tokens
    world.finish_all()


def test_a_damaged_row_ends_its_own_sequence_and_all_cached_state() -> None:
    world = warm_world()
    neighbour = world.submit(list(range(500, 520)), 30)
    for _ in range(4):
        world.step()
    damaged = world.submit([*range(100), 7], 5)
    report = run_step_with(world, damaging(world, row=1))
    assert [(finish.uid, finish.reason) for finish in report.finished] == [(damaged, "error")]
    assert "not finite" in str(report.finished[0].message)
    assert report.uids == [neighbour]
    assert world.cache.full_use.tree == 0
    after = world.stories[world.submit([*range(100), 8], 5)]
    world.run()
    assert after.cached_tokens == 0
    # The world compares every text with a cold run's.
    assert len(world.stories[neighbour].tokens) == 30
    world.finish_all()


def test_damage_leaves_the_state_of_sequences_that_the_step_did_not_run() -> None:
    world = warm_world()
    world.submit(list(range(200, 250)), 5)
    waiting = world.submit(list(range(200, 250)), 5)  # follows the first
    run_step_with(world, damaging(world, row=0))
    world.run()
    assert len(world.stories[waiting].tokens) == 5
    world.finish_all()


def test_damaged_scores_end_their_sequence() -> None:
    world = warm_world()
    uid = world.submit(list(range(300, 350)), 0, scores_prompt=True)
    real_step = world.runner.step

    def step(inputs: ForwardInput, draws: Draws) -> StepOutput:
        output = real_step(inputs, draws)
        assert output.scores is not None
        output.scores.token_logprobs[5] = float("nan")
        return output

    report = run_step_with(world, step)
    assert [(finish.uid, finish.reason) for finish in report.finished] == [(uid, "error")]
    assert not report.finished[0].is_own_fault
    assert not report.prompt_scores
    assert world.cache.full_use.tree == 0
    world.finish_all()


@pytest.mark.parametrize("neighbours", [0, 1])
def test_an_engine_gives_up_when_step_after_step_gives_nothing(neighbours: int) -> None:
    world = warm_world()
    for index in range(neighbours):
        world.submit(list(range(600 + index, 620 + index)), 50)
        world.step()

    def fail_one() -> None:
        world.submit(list(range(700, 720)), 5)
        run_step_with(world, damaging(world, row=neighbours))

    for _ in range(MAX_FAILED_STEPS - 1):
        fail_one()
    if neighbours:
        fail_one()
        return
    with pytest.raises(EngineBroken):
        fail_one()


def test_nothing_to_choose_from_ends_one_sequence_and_keeps_the_cached_state() -> None:
    world = warm_world()
    uid = world.submit([*range(100), 7], 5)
    real_step = world.runner.step

    def step(inputs: ForwardInput, draws: Draws) -> StepOutput:
        return replace(real_step(inputs, draws), faults={0: RowFault.NOTHING_ALLOWED})

    report = run_step_with(world, step)
    assert [(finish.uid, finish.reason) for finish in report.finished] == [(uid, "error")]
    assert "no token is left" in str(report.finished[0].message)
    assert report.finished[0].is_own_fault
    assert world.cache.full_use.tree > 0
    world.finish_all()
