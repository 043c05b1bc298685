"""The measurement of --rebuild-depth: all windows are exact, one is not, and what it compares is real."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.rebuild_world import save_pattern

from forkpoint.configs.errors import ConfigError
from forkpoint.model.load import Model, load_model
from forkpoint.scheduler.measure_rebuild import equal_start, measure_rebuild
from forkpoint.scheduler.rebuild_probe import PAGE_SIZE, RebuildProbe

PATTERN, WINDOW, NUM_SWA_LAYERS = "SSSSSF", 40, 5
NUM_TOKENS = 640


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = save_pattern(tmp_path_factory.mktemp("tiny"), PATTERN, WINDOW)
    return load_model(directory, dtype="float32", device="cpu")


def random_tokens(count: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(3, 256) for _ in range(count)]


def test_as_many_windows_as_layers_are_exact_and_fewer_are_not(model: Model) -> None:
    tokens = random_tokens(NUM_TOKENS + PAGE_SIZE)
    notices: list[str] = []
    found = measure_rebuild(
        model, tokens, [1, 3, NUM_SWA_LAYERS, None], num_tokens=NUM_TOKENS + 5, notice=notices.append
    )
    assert (found.num_tokens, found.window, found.num_swa_layers) == (NUM_TOKENS, WINDOW, NUM_SWA_LAYERS)
    one, three, all_windows, exact = found.errors
    # Five windows may start off the tile grid and sum in another order; exactly on it is equal to the bit.
    assert exact.max_error == exact.mean_error == 0.0
    assert all_windows.max_error < 1e-4
    assert exact.equal_tokens == all_windows.equal_tokens == found.num_new == 32
    assert one.max_error > three.max_error > 1e-4
    assert one.mean_error > three.mean_error > all_windows.mean_error
    assert one.first_row == 592  # page_floor(640 - 39)
    assert three.first_row == 592 - 2 * 39
    # Five windows of 39 below 592; and exactly, where each is rounded down to the tile of 64.
    assert all_windows.first_row == 592 - 4 * 39
    assert exact.first_row == 320
    assert min(error.first_token_s for error in found.errors) > 0 < found.cold_s
    assert len(notices) == 5


def test_the_rebuilt_window_has_the_bits_of_the_cold_one(model: Model) -> None:
    probe = RebuildProbe(model, random_tokens(NUM_TOKENS + PAGE_SIZE), num_new=4)
    cold = probe.cold()
    assert (cold.cached, cold.rebuilt) == (0, 0)
    for _ in range(2):  # the first rebuild must leave nothing that the second could use
        run = probe.rebuilt(None)
        assert run.rebuilt == NUM_TOKENS - 320
        assert run.tokens == cold.tokens
        assert len(run.window) == NUM_SWA_LAYERS
        for layer, tensors in run.window.items():
            for ours, first in zip(tensors, cold.window[layer], strict=True):
                assert len(ours) == WINDOW - 1
                assert torch.equal(ours, first)
    again = probe.cold()
    assert again.cached == again.rebuilt == 0
    assert torch.equal(again.logits, cold.logits)


def test_what_cannot_be_measured_is_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beyond the model's context of 4096") as caught:
        measure_rebuild(model, random_tokens(5000), [None], num_tokens=4500)
    assert caught.value.hint == "measure fewer by --tokens"
    only_full = load_model(save_pattern(tmp_path, "FF", 8), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="no sliding-window layers"):
        measure_rebuild(only_full, random_tokens(100), [None], num_tokens=64)


def test_equal_start_counts_until_the_first_difference() -> None:
    assert equal_start([1, 2, 3], [1, 2, 3]) == 3
    assert equal_start([1, 9, 3], [1, 2, 3]) == 1
    assert equal_start([], []) == 0
