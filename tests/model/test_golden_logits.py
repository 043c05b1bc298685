"""Logits equal those of transformers in float32, however the rows are cut, paged, shared and batched."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.golden import (
    PROMPT_LENGTH,
    TOLERANCE,
    Checkpoints,
    float32_model,
    largest_error,
    poisoned_world,
    random_prompt,
    run_in_chunks,
)
from support.paged import PagedWorld
from support.tiny_checkpoints import WINDOW, reference_logits

from forkpoint.model.runner import ModelRunner

# All ways to cut and page rows, on few families; test_families.py runs a few ways on all families.
FAMILIES = ("gemma3", "llama", "qwen3", "qwen3_sliding")
HYBRID_FAMILIES = ("gemma3", "qwen3_sliding")
BACKENDS = ("torch", "cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [PROMPT_LENGTH, 32, 7, 1])
def test_prefill_in_chunks_equals_transformers(
    checkpoints: Checkpoints, family: str, backend: str, page_size: int, chunk: int
) -> None:
    tokens = random_prompt(seed=1)
    reference = reference_logits(checkpoints[family], tokens)
    world = poisoned_world(float32_model(checkpoints[family]), page_size=page_size, backend=backend)
    sequence = run_in_chunks(world, tokens, chunk)
    assert largest_error(sequence, reference) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_batches_of_many_sequences_equal_transformers(
    checkpoints: Checkpoints, family: str, backend: str, page_size: int
) -> None:
    """Prefill chunks and decode rows of any length side by side, in any order."""
    rng = np.random.default_rng(page_size)
    world = poisoned_world(float32_model(checkpoints[family]), page_size=page_size, backend=backend)
    sequences = [
        world.sequence(random_prompt(seed=seed, length=length))
        for seed, length in enumerate((101, 60, 33, 2, 1))
    ]
    while pending := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = rng.permutation(len(pending))[: rng.integers(1, len(pending) + 1)]
        batch = []
        for index in chosen:
            left = len(pending[index].token_ids) - pending[index].num_computed
            batch.append((pending[index], min(left, int(rng.choice([1, 1, 2, 5, 17, 40])))))
        world.step(batch)
        for sequence in sequences:
            world.drop_out_of_window(sequence)
    for sequence in sequences:
        reference = reference_logits(checkpoints[family], sequence.token_ids)
        assert largest_error(sequence, reference) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("start", "full_hit"), [(64, 64), (32, 64), (0, 64), (48, 80)])
def test_reused_prefix_with_gap_rows_equals_transformers(
    checkpoints: Checkpoints, family: str, backend: str, page_size: int, start: int, full_hit: int
) -> None:
    """Rows in [start, full_hit) read another sequence's full KV and write none; SWA is live up to start."""
    shared = random_prompt(seed=1)[:full_hit]
    first_tokens = shared + random_prompt(seed=2)[:20]
    second_tokens = shared + random_prompt(seed=3)[:30]
    world = poisoned_world(float32_model(checkpoints[family]), page_size=page_size, backend=backend)
    first = world.sequence(first_tokens)
    world.step([(first, start or 1)])
    second = world.fork(first, second_tokens, start=start, full_hit=full_hit) if start == full_hit else None
    world.step([(first, len(first_tokens) - first.num_computed)])
    if second is None:
        second = world.fork(first, second_tokens, start=start, full_hit=full_hit)
    neighbour = world.sequence(random_prompt(seed=4))
    while second.num_computed < len(second_tokens):
        num_rows = min(13, len(second_tokens) - second.num_computed)
        world.step([(neighbour, 3), (second, num_rows)])
        world.drop_out_of_window(second, shared_with=[first])
    reference = reference_logits(checkpoints[family], second_tokens)
    assert largest_error(second, reference, start=start) < TOLERANCE
    # The source goes on undisturbed: gap rows wrote nothing into its pages.
    first.token_ids += random_prompt(seed=5)[:4]
    world.step([(first, 4)])
    assert largest_error(first, reference_logits(checkpoints[family], first.token_ids)) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_without_full_layers_equals_transformers(checkpoints: Checkpoints, backend: str) -> None:
    """Only one kind of table; a fork resumes where its window is live."""
    tokens = random_prompt(seed=1)
    world = poisoned_world(float32_model(checkpoints["qwen3_all_sliding"]), page_size=4, backend=backend)
    first = world.sequence(tokens)
    world.step([(first, 64)])
    second = world.fork(first, tokens, start=64, full_hit=64)
    world.drop_out_of_window(first)
    world.step([(first, len(tokens) - 64), (second, 20)])
    reference = reference_logits(checkpoints["qwen3_all_sliding"], tokens)
    assert largest_error(first, reference) < TOLERANCE
    assert largest_error(second, reference, start=64) < TOLERANCE


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [PROMPT_LENGTH, 1])
@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_window_off_by_one_is_seen(
    checkpoints: Checkpoints, family: str, backend: str, chunk: int, wrong_by: int
) -> None:
    tokens = random_prompt(seed=1)
    model = float32_model(checkpoints[family])
    layers = tuple(
        layer if layer.window is None else dataclasses.replace(layer, window=layer.window + wrong_by)
        for layer in model.config.layers
    )
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers))
    world = poisoned_world(wrong, page_size=4, backend=backend)
    sequence = world.sequence(tokens)
    while sequence.num_computed < len(tokens):
        world.step([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
    assert largest_error(sequence, reference_logits(checkpoints[family], tokens)) > 0.1


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_page_dropped_one_position_early_is_seen(checkpoints: Checkpoints, family: str, backend: str) -> None:
    """The lowest position that a row sees lies in a poisoned page: the poison must come through."""
    tokens = random_prompt(seed=1)
    world = poisoned_world(float32_model(checkpoints[family]), page_size=1, backend=backend)
    sequence = world.sequence(tokens)
    world.step([(sequence, 50)])
    world.poison("swa", sequence.pages["swa"][50 - (WINDOW - 1) - 1])
    world.step([(sequence, 1)])
    assert torch.isfinite(sequence.logits[-1]).all()
    world.poison("swa", sequence.pages["swa"][51 - (WINDOW - 1)])
    world.step([(sequence, 1)])
    assert not torch.isfinite(sequence.logits[-1]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_kv_gives_the_same_logits_cold_and_warm(checkpoints: Checkpoints, backend: str) -> None:
    """This step's keys are read back as stored, so a prompt in one piece and in many agree in float32."""
    tokens = random_prompt(seed=1)
    results = []
    for chunk in (PROMPT_LENGTH, 9):
        runner = ModelRunner(
            float32_model(checkpoints["gemma3"]),
            num_pages={"full": 64, "swa": 64},
            page_size=4,
            kv_cache_dtype="bfloat16",
            attention_backend=backend,
        )
        world = PagedWorld(runner, page_size=4)
        sequence = world.sequence(tokens)
        while sequence.num_computed < len(tokens):
            world.step([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
        results.append(torch.cat(sequence.logits))
    # A value at the edge of two bfloat16 numbers may round differently; reading unrounded KV would give 0.1.
    assert float((results[0] - results[1]).abs().mean()) < 2e-3
    reference = reference_logits(checkpoints["gemma3"], tokens)
    assert 1e-3 < float((results[0] - reference).abs().mean()) < 0.2
