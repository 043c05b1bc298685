"""The runner: tokens from a batch, KV pools of the right size, and a bfloat16 path close to float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paged import PagedWorld
from support.tiny_checkpoints import VOCAB_SIZE, reference_logits

from forkpoint.configs.errors import ConfigError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.model.config import load_config
from forkpoint.model.device import has_native_bfloat16, resolve_dtype, set_num_threads
from forkpoint.model.inputs import Draw
from forkpoint.model.load import load_model
from forkpoint.model.runner import ModelRunner

Checkpoints = Mapping[str, Path]
PAGES = {"full": 64, "swa": 64}


def _runner(model_dir: Path, *, dtype: str = "float32") -> ModelRunner:
    return ModelRunner(load_model(model_dir, dtype=dtype, device="cpu"), num_pages=PAGES, page_size=4)  # type: ignore[arg-type]


def _prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, VOCAB_SIZE, length)]


def test_greedy_steps_equal_the_argmax_of_transformers(checkpoints: Checkpoints) -> None:
    runner = _runner(checkpoints["gemma3"])
    world = PagedWorld(runner, page_size=4)
    sequence = world.sequence(_prompt(30))
    greedy = SamplingParams(seed=0, max_tokens=16, temperature=0.0)
    num_rows = 30
    for _ in range(16):
        inputs = world.inputs([(sequence, num_rows)])
        last_row = replace(inputs, sample_rows=inputs.sample_rows[-1:])
        tokens = runner.step(last_row, [Draw(greedy, 0, len(sequence.token_ids))]).tokens
        assert tokens.dtype == np.int64
        sequence.num_computed += num_rows
        sequence.token_ids.append(int(tokens[0]))
        num_rows = 1
    logits = reference_logits(checkpoints["gemma3"], sequence.token_ids)
    assert sequence.token_ids[30:] == logits[29:-1].argmax(dim=-1).tolist()


def test_chunk_that_samples_nothing_still_writes_its_kv(checkpoints: Checkpoints) -> None:
    tokens = _prompt(40)
    runner = _runner(checkpoints["qwen3_sliding"])
    world = PagedWorld(runner, page_size=4)
    sequence = world.sequence(tokens)
    silent = replace(world.inputs([(sequence, 35)]), sample_rows=np.zeros(0, dtype=np.int64))
    assert runner.step(silent, []).tokens.shape == (0,)
    assert runner.logits(silent).shape == (0, VOCAB_SIZE)
    sequence.num_computed = 35
    world.step([(sequence, 5)])
    reference = reference_logits(checkpoints["qwen3_sliding"], tokens)[35:]
    torch.testing.assert_close(sequence.logits[0], reference, atol=1e-4, rtol=0)


def test_only_sampled_rows_get_logits(checkpoints: Checkpoints) -> None:
    runner = _runner(checkpoints["gemma3"])
    world = PagedWorld(runner, page_size=4)
    inputs = world.inputs([(world.sequence(_prompt(9)), 9), (world.sequence(_prompt(5)), 5)])
    everything = runner.logits(inputs)
    chosen = runner.logits(replace(inputs, sample_rows=np.array([13, 8], dtype=np.int64)))
    torch.testing.assert_close(chosen, everything[[13, 8]], atol=1e-5, rtol=0)


# One for each way to round: norms, rotations, experts, sinks, softcaps, narrow values, multipliers.
@pytest.mark.parametrize(
    "family",
    ["cohere2", "gemma2", "gemma3", "gpt_oss", "granite_swa", "mimo_v2_flash", "olmo3", "qwen3", "qwen3_moe"],
)
def test_bfloat16_is_close_to_float32(checkpoints: Checkpoints, family: str) -> None:
    tokens = _prompt(100)
    reference = reference_logits(checkpoints[family], tokens)
    world = PagedWorld(_runner(checkpoints[family], dtype="bfloat16"), page_size=4)
    sequence = world.sequence(tokens)
    world.step([(sequence, 90)])
    for _ in range(10):
        world.step([(sequence, 1)])
    error = (torch.cat(sequence.logits) - reference).abs()
    # transformers' own bfloat16 differs from its float32 by .01 to .03 standard deviations on such models,
    # and by .02 to .15 where a rounded score may choose another expert.
    has_experts = any(layer.moe is not None for layer in load_config(checkpoints[family]).layers)
    assert float(error.mean()) < (0.25 if has_experts else 0.05) * float(reference.std())


def test_warm_up_touches_page_zero_only(checkpoints: Checkpoints) -> None:
    runner = _runner(checkpoints["gemma3"])
    runner.warm_up()
    for layer in runner.pools.layers:
        assert layer.keys[0].any() and layer.values[0].any()
        assert not layer.keys[1:].any() and not layer.values[1:].any()


def test_pools_have_the_asked_pages_per_kind(checkpoints: Checkpoints) -> None:
    model = load_model(checkpoints["gemma3"], dtype="float32", device="cpu")
    runner = ModelRunner(model, num_pages={"full": 5, "swa": 9}, page_size=4, kv_cache_dtype="bfloat16")
    shapes = [layer.keys.shape for layer in runner.pools.layers]
    assert shapes == [(9 if letter == "S" else 5, 4, 2, 32) for letter in model.config.layer_pattern]
    for kind, count in {"full": 5, "swa": 9}.items():
        num_bytes = sum(
            tensor.numel() * tensor.element_size()
            for spec, layer in zip(model.config.layers, runner.pools.layers, strict=True)
            if spec.kind == kind
            for tensor in (layer.keys, layer.values)
        )
        assert num_bytes == count * 4 * model.config.kv_bytes_per_token(kind, torch.bfloat16)  # type: ignore[arg-type]


def test_pool_without_a_usable_page_is_refused(checkpoints: Checkpoints) -> None:
    model = load_model(checkpoints["gemma3"], dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="swa pool has 1 pages"):
        ModelRunner(model, num_pages={"full": 5, "swa": 1}, page_size=4)


def test_pool_larger_than_memory_is_refused(checkpoints: Checkpoints) -> None:
    model = load_model(checkpoints["llama"], dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="no memory for a KV pool") as error:
        ModelRunner(model, num_pages={"full": 2**44}, page_size=4)
    assert error.value.hint is not None and "--kv-cache-memory-bytes" in error.value.hint


def test_auto_dtype_follows_what_the_device_multiplies() -> None:
    expected = torch.bfloat16 if has_native_bfloat16() else torch.float32
    assert resolve_dtype("auto", torch.device("cpu"), "bfloat16") == expected
    assert resolve_dtype("auto", torch.device("cuda"), "float16") == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda"), "float32") == torch.float32
    assert resolve_dtype("float32", torch.device("cuda"), "bfloat16") == torch.float32


def test_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        assert set_num_threads(1) == 1 == torch.get_num_threads()
        assert set_num_threads(None) == 1
    finally:
        torch.set_num_threads(before)
