"""Scored prompts and max_tokens 0: the same entries for every chunking and every state of the cache."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checking_runner import expected_scores
from support.engine_world import EngineWorld
from support.model_world import Answer, ModelWorld
from support.tiny_checkpoints import reference_logits
from support.tiny_models import VOCAB_SIZE, one_character_per_token, save_tiny_model

from forkpoint.cache import CacheGeometry
from forkpoint.configs.errors import RequestError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.limits import SchedulerLimits


def prompt(start: int, length: int) -> list[int]:
    return [start * 1000 + index for index in range(length)]


def small_world(*, full_pages: int = 200, max_rows: int = 64, pattern: str = "SFSS") -> EngineWorld:
    return EngineWorld(
        CacheGeometry(4, 16), full_pages=full_pages, swa_pages=100, max_rows=max_rows, pattern=pattern
    )


@pytest.mark.parametrize("max_rows", [1, 3, 17, 300])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_warm_cache_gives_every_entry(max_rows: int, max_tokens: int) -> None:
    world = small_world(max_rows=max_rows)
    tokens = prompt(0, 90)
    for scores_prompt in (False, True, True, False):
        asked = max_tokens if scores_prompt else max(1, max_tokens)
        uid = world.submit(tokens, asked, scores_prompt=scores_prompt, num_logprobs=2)
        world.run()
        story = world.stories[uid]
        # The world compares entries and tokens with a cold run's, and the order of the pieces.
        assert len(story.tokens) == asked and story.finish is not None and story.finish.reason == "length"
        assert story.prompt_scores == (expected_scores(tokens) if scores_prompt else [])
        if scores_prompt:
            assert story.cached_tokens == 0
    # What a scored request computed serves the next one.
    assert (story.cached_tokens or 0) + (story.rebuilt_tokens or 0) >= 80
    world.finish_all()


def test_scoring_publishes_what_it_computes() -> None:
    world = small_world()
    world.submit(prompt(0, 90), 0, scores_prompt=True)
    world.run()
    story = world.stories[world.submit([*prompt(0, 90), 7], 3)]
    world.run()
    assert story.cached_tokens == 88
    world.finish_all()


def test_a_sequence_without_tokens_counts_nothing_generated() -> None:
    world = small_world()
    uid = world.submit(prompt(0, 33), 0, scores_prompt=True)
    neighbour = world.submit(prompt(1, 33), 9)
    world.run()
    assert world.stories[uid].tokens == [] and len(world.stories[neighbour].tokens) == 9
    assert world.engine.stats().generation_tokens == 9
    world.finish_all()


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_of_one_token_has_no_entry_and_says_so(max_tokens: int) -> None:
    world = small_world()
    uid = world.submit([5], max_tokens, scores_prompt=True, num_logprobs=2)
    reports = [world.step() for _ in range(max_tokens + 2)]
    pieces = [piece for report in reports for piece in report.prompt_scores]
    assert [(piece.uid, piece.start, len(piece.logprobs)) for piece in pieces] == [(uid, 1, 0)]
    assert pieces[0].logprobs.top_ids.shape == (0, 2)
    world.finish_all()


def test_followers_do_not_hold_a_scored_prompt_up() -> None:
    world = small_world(max_rows=300)
    world.submit(prompt(0, 200), 5)
    scored = world.submit(prompt(0, 200), 0, scores_prompt=True)
    world.step()
    assert world.stories[scored].cached_tokens == 0, (
        "it shares nothing with its neighbour, so it need not wait"
    )
    world.finish_all()


def test_a_retracted_sequence_sends_no_entry_twice() -> None:
    """The oldest grow until the newest, which is being scored chunk by chunk, has to go."""
    num_retracted = 0
    for seed in range(25):
        rng = random.Random(seed)
        world = EngineWorld(
            CacheGeometry(4, 16),
            full_pages=60,
            swa_pages=200,
            max_rows=rng.choice([8, 16, 24]),
            reserved_decode_tokens=0,
        )
        for index in range(4):
            scores = index > 0
            world.submit(
                prompt(index, rng.randint(20, 60)),
                rng.choice([60, 90] if index < 2 else [0, 30]),
                scores_prompt=scores,
            )
            for _ in range(rng.randint(0, 6)):
                world.step()
        world.finish_all()
        num_retracted += world.engine.stats().retractions
    assert num_retracted > 10


def test_a_prompt_may_fill_the_context_where_nothing_is_generated() -> None:
    limits = SchedulerLimits(
        CacheGeometry(4, 16), context_length=100, max_rows=8, max_running=1, full_pages=50, swa_pages=50
    )
    limits.check(100, 0)
    for length, max_tokens in ((100, 1), (101, 0)):
        with pytest.raises(RequestError, match="the context is 100"):
            limits.check(length, max_tokens)


# ---- the real model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), one_character_per_token())


def scoring(max_tokens: int = 0) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, num_logprobs=3, scores_prompt=True)


def assert_scores(answer: Answer, expected: NDArray[np.float64], tokens: list[int]) -> None:
    scores = answer.scores
    assert len(scores) == len(tokens) - 1
    # The golden tests hold logits within 1e-4 of transformers.
    np.testing.assert_allclose(scores.token_logprobs, expected[np.arange(len(scores)), tokens[1:]], atol=2e-4)
    top = np.sort(expected[: len(scores)], axis=-1)[:, ::-1][:, :3]
    np.testing.assert_allclose(scores.top_logprobs, top, atol=2e-4)


@pytest.mark.parametrize("chunk", [16, 37, 512])
def test_scores_equal_transformers_cold_warm_evicted_and_beside_neighbours(
    model_dir: Path, chunk: int
) -> None:
    rng = np.random.default_rng(1)
    tokens = [int(token) for token in rng.integers(4, VOCAB_SIZE, 150)]
    logits = reference_logits(model_dir, tokens).double().numpy()
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    world = ModelWorld(model_dir, chunk=chunk)
    assert_scores(world.answer(tokens, scoring()), expected, tokens)
    plain = SamplingParams(seed=0, max_tokens=6, temperature=0.0)
    free = world.answer(tokens, plain)
    assert free.cached_tokens > 100
    warm = world.answer(tokens, scoring(max_tokens=6))
    assert_scores(warm, expected, tokens)
    assert warm.tokens == free.tokens and len(warm.logprobs) == 6
    world.engine.scheduler.cache.evict_windows()
    neighbours = [world.submit(tokens[:n], plain) for n in (150, 99, 20)]
    assert_scores(world.answer(tokens, scoring()), expected, tokens)
    assert neighbours[0].tokens == free.tokens
    assert world.engine.stats().rebuilt_tokens > 0, "a rebuild ran beside the scored rows"
    world.flush()
    assert_scores(world.answer(tokens, scoring()), expected, tokens)
