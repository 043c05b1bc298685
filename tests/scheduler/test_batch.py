"""A step's input made in whole arrays is the one that is made span by span."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
from support.batch_oracle import oracle_forward_input
from support.engine_world import VOCAB_SIZE, EngineWorld, random_engine

from forkpoint.configs.sampling import SamplingParams
from forkpoint.model.inputs import ForwardInput, Kind, KindTable
from forkpoint.model.outputs import StepOutput
from forkpoint.scheduler.batch import build_forward_input, draws_of
from forkpoint.scheduler.messages import Submit


@pytest.mark.parametrize("seed", range(60))
def test_arrays_of_a_step_are_those_made_span_by_span(seed: int) -> None:
    """Chunks, decode rows, hits, rebuilds and retractions of random worlds, with and without a window."""
    rng = random.Random(seed)
    world = random_engine(rng)
    kinds: tuple[Kind, ...] = ("full",) if world.geometry.window is None else ("full", "swa")
    for uid in range(25):
        world.engine.handle(
            Submit(uid, _prompt(rng), SamplingParams(seed=uid, max_tokens=rng.choice([1, 9, 60])))
        )
        for _ in range(rng.randint(0, 6)):
            _compare_step(world, kinds)
    for _ in range(2000):
        if not world.scheduler.has_work:
            return
        _compare_step(world, kinds)
    raise AssertionError("still at work")


def test_draws_name_the_place_and_the_text_of_each_sampled_row() -> None:
    world = random_engine(random.Random(1))
    params = SamplingParams(seed=7, max_tokens=20)
    world.engine.handle(Submit(0, np.arange(1, 40, dtype=np.int32), params, choice=2))
    num_draws = 0
    while world.scheduler.has_work:
        plan = world.scheduler.plan()
        for draw in draws_of(plan):
            assert (draw.params, draw.choice, draw.prompt_len, draw.mask) == (params, 2, 39, None)
            assert draw.position == len(draw.token_ids) == 39 + num_draws
            num_draws += 1
        world.scheduler.commit(plan, StepOutput(np.full(len(draws_of(plan)), 5, dtype=np.int64)))
    assert num_draws == 20


def _prompt(rng: random.Random) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Few distinct tokens, so that prompts share prefixes of many lengths."""
    shared = [1, 2, 1, 1] * rng.choice([0, 5, 20])
    own = [rng.randint(1, 2) for _ in range(rng.choice([1, 3, 17, 40]))]
    return np.array(shared + own, dtype=np.int32)


def _compare_step(world: EngineWorld, kinds: tuple[Kind, ...]) -> None:
    plan = world.scheduler.plan()
    world.scheduler.take_events()
    if not plan.spans:
        return
    inputs = build_forward_input(plan, kinds, world.geometry.page_size, world.cache.staircase)
    _assert_same(inputs, oracle_forward_input(plan, kinds, world.geometry.page_size))
    assert len(draws_of(plan)) == len(inputs.sample_rows)
    tokens = np.arange(len(inputs.sample_rows), dtype=np.int64) % VOCAB_SIZE
    world.scheduler.commit(plan, StepOutput(tokens))
    world.cache.audit()


def _assert_same(found: ForwardInput, expected: ForwardInput) -> None:
    for name in ("token_ids", "positions", "q_indptr", "full_hits", "sample_rows"):
        _assert_equal_arrays(name, getattr(found, name), getattr(expected, name))
    assert found.tables.keys() == expected.tables.keys()
    for kind, table in expected.tables.items():
        for field in fields(KindTable):
            _assert_equal_arrays(
                f"{kind}.{field.name}", getattr(found.tables[kind], field.name), getattr(table, field.name)
            )


def _assert_equal_arrays(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype, name
    np.testing.assert_array_equal(found, expected, err_msg=name)
