"""Windows of every hybrid family are rebuilt as a cold run computes them; so are those of several sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.rebuild_world import RebuildWorld
from support.tiny_checkpoints import WINDOW, save_tiny_checkpoint

from forkpoint.model.load import Model, load_model

# Float32 sums in another order: transformers itself differs by 1e-5 from itself between chunkings.
LOGITS_TOLERANCE = 1e-4
KV_TOLERANCE = 2e-5
MAX_TOKENS = 3
FAMILIES = (
    "cohere2", "cwm", "exaone4", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mellum",
    "mimo_v2_flash", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "smollm3", "vaultgemma",
)  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


SYSTEM = prompt(0, 128)


def tiny_model(name: str, directory: Path) -> Model:
    return load_model(save_tiny_checkpoint(name, directory), dtype="float32", device="cpu")


def assert_rebuilt_equals_cold(model: Model, *, page_size: int, max_rows: int) -> None:
    """The system prompt is computed, its windows are lost, and the next prompt with it rebuilds them."""
    warm = RebuildWorld(model, page_size=page_size, max_rows=max_rows)
    cold = RebuildWorld(model, page_size=page_size, max_rows=max_rows, enabled=False)
    warm.run_one(SYSTEM + prompt(1, 30), 1)
    warm.drop_windows()
    assert model.config.window is not None
    full_hit = len(SYSTEM)
    warm.runner.watched = cold.runner.watched = (full_hit - (model.config.window - 1), full_hit)
    asked = SYSTEM + prompt(2, 20)
    tokens, logits = warm.answer(asked, MAX_TOKENS)
    expected_tokens, expected = cold.answer(asked, MAX_TOKENS)
    stats = warm.engine.stats()
    assert stats.windows_rebuilt == 1 and stats.rebuilt_tokens > 0
    assert (logits - expected).abs().max() < LOGITS_TOLERANCE
    assert tokens == expected_tokens
    assert warm.runner.swa_kv
    for layer, tensors in warm.runner.swa_kv.items():
        for rebuilt, first in zip(tensors, cold.runner.swa_kv[layer], strict=True):
            assert (rebuilt - first).abs().max() < KV_TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize(("page_size", "max_rows"), [(1, 300), (4, 23)])
@pytest.mark.parametrize("name", FAMILIES)
def test_rebuilt_windows_equal_those_of_a_cold_run(
    tmp_path: Path, name: str, page_size: int, max_rows: int
) -> None:
    assert_rebuilt_equals_cold(tiny_model(name, tmp_path), page_size=page_size, max_rows=max_rows)


@pytest.mark.parametrize("windows", [(5, WINDOW, 9), (WINDOW, 5, 3), (3, 3, 20)])
def test_layers_with_windows_of_their_own_are_rebuilt(tmp_path: Path, windows: tuple[int, ...]) -> None:
    """They are one kind with the largest window: no layer finds less than it looks at."""
    model = tiny_model("ministral", tmp_path)
    full, *sliding = model.config.layers
    layers = (full, *(replace(spec, window=w) for spec, w in zip(sliding, windows, strict=True)))
    several = replace(model, config=replace(model.config, layers=layers))
    assert several.config.window == max(windows)
    assert_rebuilt_equals_cold(several, page_size=4, max_rows=50)
