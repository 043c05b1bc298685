"""A rebuilt window is the window that a cold run computes: logits, KV, and bits on the tile grid."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.rebuild_world import RebuildWorld, save_pattern

from forkpoint.configs.staircase import Staircase
from forkpoint.model.load import Model, load_model

# Float32 sums in another order: transformers itself differs by 1e-5 from itself between chunkings.
LOGITS_TOLERANCE = 1e-4
KV_TOLERANCE = 1e-5
MAX_TOKENS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Model]:
    made = {}
    for pattern, window in [("SFSFSS", 4), ("SSSSSF", 16), ("FSSSSS", 8), ("SSFSSF", 16), ("SSFSSF", 100)]:
        directory = save_pattern(tmp_path_factory.mktemp("tiny"), pattern, window)
        made[pattern, window] = load_model(directory, dtype="float32", device="cpu")
    return made


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


SYSTEM = prompt(0, 192)


def warm_and_cold(
    model: Model, *, page_size: int, max_rows: int, backend: str, keep_below: int | None = None
) -> tuple[RebuildWorld, RebuildWorld]:
    """Two worlds; the warm one has computed the system prompt and lost its windows since."""
    warm = RebuildWorld(model, page_size=page_size, max_rows=max_rows, backend=backend)
    cold = RebuildWorld(model, page_size=page_size, max_rows=max_rows, backend=backend, enabled=False)
    if keep_below is not None:
        warm.run_one(SYSTEM[:keep_below], 1)
    warm.run_one(SYSTEM + prompt(1, 60), 1)
    warm.drop_windows(keep_below=keep_below)
    return warm, cold


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("max_rows", [7, 32, 300])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("key", [("SFSFSS", 4), ("SSSSSF", 16), ("FSSSSS", 8), ("SSFSSF", 16)])
def test_rebuilt_windows_equal_those_of_a_cold_run(
    models: dict[tuple[str, int], Model], key: tuple[str, int], page_size: int, max_rows: int, backend: str
) -> None:
    warm, cold = warm_and_cold(models[key], page_size=page_size, max_rows=max_rows, backend=backend)
    full_hit = len(SYSTEM)
    warm.runner.watched = cold.runner.watched = (full_hit - (key[1] - 1), full_hit)
    asked = SYSTEM + prompt(2, 30)
    before = warm.engine.stats()
    tokens, logits = warm.answer(asked, MAX_TOKENS)
    expected_tokens, expected = cold.answer(asked, MAX_TOKENS)
    stats = warm.engine.stats()
    assert stats.windows_rebuilt == before.windows_rebuilt + 1
    assert stats.rebuilt_tokens > before.rebuilt_tokens
    assert tokens == expected_tokens
    assert (logits - expected).abs().max() < LOGITS_TOLERANCE
    assert warm.runner.swa_kv.keys() == cold.runner.swa_kv.keys() and warm.runner.swa_kv
    for layer, tensors in warm.runner.swa_kv.items():
        for rebuilt, first in zip(tensors, cold.runner.swa_kv[layer], strict=True):
            assert (rebuilt - first).abs().max() < KV_TOLERANCE, f"layer {layer}"
    # The next request finds the rebuilt window, and it is as good as the first.
    warm.poison_free_pages()
    asked = SYSTEM + prompt(3, 30)
    _, again = warm.answer(asked, MAX_TOKENS)
    assert warm.engine.stats().cached_tokens == stats.cached_tokens + full_hit
    assert (again - cold.answer(asked, MAX_TOKENS)[1]).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("keep_below", [40, 100, 160])
def test_a_live_window_below_is_the_floor_of_the_staircase(
    models: dict[tuple[str, int], Model], keep_below: int
) -> None:
    model = models["SSFSSF", 100]
    warm, cold = warm_and_cold(model, page_size=4, max_rows=50, backend="torch", keep_below=keep_below)
    asked = SYSTEM + prompt(2, 30)
    _, logits = warm.answer(asked, MAX_TOKENS)
    assert (logits - cold.answer(asked, MAX_TOKENS)[1]).abs().max() < LOGITS_TOLERANCE
    assert warm.engine.stats().windows_rebuilt == 1 + (keep_below < 0)


def test_several_rebuilds_and_running_neighbours_share_batches(models: dict[tuple[str, int], Model]) -> None:
    model = models["SSSSSF", 16]
    warm = RebuildWorld(model, page_size=4, max_rows=64)
    systems = [prompt(seed, 150 + 20 * seed) for seed in range(3)]
    for system in systems:
        warm.run_one(system + prompt(7, 40), 1)
    warm.drop_windows()
    asked = [system + prompt(11 + index, 20 + index) for index, system in enumerate(systems)]
    neighbour = prompt(20, 90)
    uids = [warm.submit(neighbour, 20)]
    warm.engine.step()
    uids += [warm.submit(each, 8) for each in asked]
    tokens = warm.run()
    assert warm.engine.stats().windows_rebuilt == 3
    cold = RebuildWorld(model, page_size=4, max_rows=300, enabled=False)
    assert tokens[uids[0]][-19:] == cold.run_one(neighbour, 20)[-19:]
    for uid, each in zip(uids[1:], asked, strict=True):
        assert tokens[uid] == cold.run_one(each, 8)


@pytest.mark.parametrize("late", [0, 1])
def test_one_row_too_late_is_seen_in_the_logits(
    models: dict[tuple[str, int], Model], monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    warm, cold = warm_and_cold(models["SFSFSS", 4], page_size=1, max_rows=300, backend="torch")
    exact = Staircase.first_rows

    def first_rows(self: Staircase, full_hit: int, resume: int) -> tuple[int, ...]:
        rows = exact(self, full_hit, resume)
        return tuple(max(rows[0] + late, row) for row in rows)

    monkeypatch.setattr(Staircase, "first_rows", first_rows)
    full_hit = len(SYSTEM)
    warm.runner.watched = cold.runner.watched = (full_hit - 3, full_hit)
    # One token after the hit: its row looks straight at the first position of the rebuilt window.
    asked = SYSTEM + prompt(2, 1)
    difference = (warm.answer(asked, 1)[1] - cold.answer(asked, 1)[1]).abs().max()
    top = warm.runner.swa_kv[5][0] - cold.runner.swa_kv[5][0]
    assert (difference < LOGITS_TOLERANCE) == (late == 0), difference
    assert (top.abs().max() < KV_TOLERANCE) == (late == 0), top.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_tile_grid_a_rebuild_is_equal_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    model = load_model(save_pattern(tmp_path, "SSSSSF", 16), dtype=dtype, device="cpu")
    system = prompt(5, 640)
    warm = RebuildWorld(model, page_size=16, max_rows=128)
    cold = RebuildWorld(model, page_size=16, max_rows=128, enabled=False)
    warm.run_one(system + prompt(1, 60), 1)
    warm.drop_windows()
    warm.runner.watched = cold.runner.watched = (640 - 15, 640)
    asked = system + prompt(2, 100)
    tokens, logits = warm.answer(asked, MAX_TOKENS)
    expected_tokens, expected = cold.answer(asked, MAX_TOKENS)
    assert warm.engine.stats().windows_rebuilt == 1
    for layer, tensors in warm.runner.swa_kv.items():
        for rebuilt, first in zip(tensors, cold.runner.swa_kv[layer], strict=True):
            assert torch.equal(rebuilt, first), f"layer {layer}"
    assert torch.equal(logits, expected)
    assert tokens == expected_tokens


def test_a_shallower_rebuild_is_finite_and_close_but_not_exact(models: dict[tuple[str, int], Model]) -> None:
    model = models["SSSSSF", 16]
    shallow = RebuildWorld(model, page_size=4, max_rows=300, depth=2)
    shallow.run_one(SYSTEM + prompt(1, 60), 1)
    shallow.drop_windows()
    asked = SYSTEM + prompt(2, 30)
    _, logits = shallow.answer(asked, 1)
    cold = RebuildWorld(model, page_size=4, max_rows=300, enabled=False)
    error = (logits - cold.answer(asked, 1)[1]).abs().max()
    assert error > LOGITS_TOLERANCE, "two windows of five are not exact"
