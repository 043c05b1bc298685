"""Attention backends agree with each other on any ragged batch, and with a sum over keys written out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_world import CPU, WINDOW, AttentionWorld, attention_config, attention_world

from forkpoint.configs.errors import ConfigError
from forkpoint.model.attention.backends import make_backend
from forkpoint.model.attention.tiles import TilesBackend
from forkpoint.model.attention.torch_reference import TorchReferenceBackend


def _summed_by_hand(
    world: AttentionWorld, layer: int, row: int, head: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k) v as loops over positions, straight from the meaning of the page table. [v_dim]."""
    spec = world.config.layers[layer]
    table = world.inputs.tables[spec.kind]
    sequence = int(np.searchsorted(world.inputs.q_indptr, row, side="right")) - 1
    position = int(world.inputs.positions[row])
    pages = table.kv_pages[table.kv_indptr[sequence] :]
    first = int(table.first_position[sequence])
    page_size = world.pools.page_size
    kv_head = head // (spec.num_q_heads // spec.num_kv_heads)
    weights, values = [], []
    for key_position in range(position + 1):
        if spec.window is not None and position - key_position >= spec.window:
            continue
        page = int(pages[(key_position - first) // page_size])
        key = world.pools.layers[layer].keys[page, key_position % page_size, kv_head].float()
        score = float(world.q[row, head].float() @ key) * spec.attention_scale
        if spec.softcap is not None:
            score = spec.softcap * math.tanh(score / spec.softcap)
        weights.append(math.exp(score))
        values.append(world.pools.layers[layer].values[page, key_position % page_size, kv_head].float())
    total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[head]))
    return torch.stack([w / total * v for w, v in zip(weights, values, strict=True)]).sum(dim=0)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_reference_equals_a_sum_over_keys(layer: int, has_sinks: bool, softcap: float | None) -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2, softcap=softcap)
    world = attention_world(config, [(0, 9), (20, 1), (11, 3)], page_size=4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    result = world.attend(TorchReferenceBackend(config, world.pools, CPU), layer, sinks)
    for row in range(13):
        for head in range(4):
            expected = _summed_by_hand(world, layer, row, head, sinks)
            torch.testing.assert_close(result[row, head], expected, atol=2e-6, rtol=0)


@settings(max_examples=80, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=6
    ),
    page_size=st.sampled_from([1, 3, 4, 16]),
    tile_rows=st.sampled_from([1, 4, 8, 64]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    num_kept_pages=st.integers(0, 2),
    softcap=st.sampled_from([None, 2.0]),
    v_dim=st.sampled_from([8, 12]),
    has_sinks=st.booleans(),
)
def test_tiles_backend_equals_the_reference(
    spans: list[tuple[int, int]],
    page_size: int,
    tile_rows: int,
    heads: tuple[int, int],
    num_kept_pages: int,
    softcap: float | None,
    v_dim: int,
    has_sinks: bool,
) -> None:
    config = attention_config(num_q_heads=heads[0], num_kv_heads=heads[1], softcap=softcap, v_dim=v_dim)
    world = attention_world(config, spans, page_size=page_size, num_kept_pages=num_kept_pages)
    sinks = torch.linspace(-1.0, 2.0, heads[0]) if has_sinks else None
    for layer in (0, 1):
        expected = world.attend(TorchReferenceBackend(config, world.pools, CPU), layer, sinks)
        result = world.attend(TilesBackend(config, world.pools, tile_rows), layer, sinks)
        # Sums of up to 190 terms in float32, in another order.
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend_name", ["torch", "cpu"])
def test_each_layer_looks_at_its_own_window(backend_name: str) -> None:
    """Three windows in one kind, whose pages are kept for the largest of them."""
    config = attention_config(num_q_heads=2, num_kv_heads=1)
    full, sliding = config.layers
    layers = (full, sliding, replace(sliding, window=3), replace(sliding, window=5))
    config = replace(config, layers=layers)
    # attention_world() fills the slots of one layer of each kind: the others are copies of it.
    world = attention_world(config, [(0, 9), (20, 1), (11, 4)], page_size=4)
    for other in (2, 3):
        world.pools.layers[other].keys.copy_(world.pools.layers[1].keys)
        world.pools.layers[other].values.copy_(world.pools.layers[1].values)
    backend = make_backend(backend_name, config, world.pools, CPU)
    for layer in range(4):
        result = world.attend(backend, layer)
        for row in range(14):
            expected = _summed_by_hand(world, layer, row, 1)
            torch.testing.assert_close(result[row, 1], expected, atol=2e-6, rtol=0)


def test_tiles_backend_in_bfloat16_is_close_to_the_reference() -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    world = attention_world(config, [(30, 50), (100, 1), (3, 1), (90, 1)], page_size=4, dtype=torch.bfloat16)
    for layer in (0, 1):
        expected = world.attend(TorchReferenceBackend(config, world.pools, CPU), layer)
        result = world.attend(TilesBackend(config, world.pools), layer)
        # bfloat16 keeps 8 bits: values near 1 are rounded by up to 4e-3, several times on the way.
        assert float((result - expected).float().abs().mean()) < 4e-3


def test_chunks_at_multiples_of_the_tile_give_the_same_bits() -> None:
    """Tiles lie at absolute positions, so that a rebuild can repeat a prefill exactly."""
    config = attention_config(num_q_heads=4, num_kv_heads=1)
    whole = attention_world(config, [(0, 64)], page_size=4)
    expected = [whole.attend(TilesBackend(config, whole.pools, 16), layer) for layer in (0, 1)]
    later = replace(
        whole,
        inputs=replace(
            whole.inputs,
            token_ids=whole.inputs.token_ids[32:],
            positions=whole.inputs.positions[32:],
            q_indptr=np.array([0, 32], dtype=np.int32),
        ),
        q=whole.q[32:],
    )
    for layer in (0, 1):
        assert torch.equal(later.attend(TilesBackend(config, whole.pools, 16), layer), expected[layer][32:])


@pytest.mark.parametrize("backend_name", ["torch", "cpu"])
def test_chosen_rows_come_out_as_among_all(backend_name: str) -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    world = attention_world(config, [(0, 9), (20, 1), (11, 70)], page_size=4)
    backend = make_backend(backend_name, config, world.pools, CPU)
    rows = torch.tensor([79, 9, 3, 40])
    for layer in (0, 1):
        whole = world.attend(backend, layer)
        chosen = backend.attend(world.q[rows], layer, rows=rows)
        # A single row of a chunk may go another way than its tile: float32 sums in another order.
        torch.testing.assert_close(chosen, whole[rows], atol=1e-5, rtol=0)


def test_table_that_starts_above_the_window_is_caught() -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    world = attention_world(config, [(20, 1)], page_size=1)
    short = replace(
        world.inputs.tables["swa"],
        kv_pages=world.inputs.tables["swa"].kv_pages[1:],
        kv_indptr=np.array([0, WINDOW - 1], dtype=np.int32),
        first_position=world.inputs.tables["swa"].first_position + 1,
    )
    wrong = replace(world, inputs=replace(world.inputs, tables={**world.inputs.tables, "swa": short}))
    with pytest.raises(AssertionError, match="swa table of sequence 0"):
        wrong.attend(TilesBackend(config, world.pools), 1)


def test_backend_is_chosen_by_name() -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    pools = attention_world(config, [(0, 1)], page_size=4).pools
    names = {name: make_backend(name, config, pools, CPU).name for name in ("auto", "cpu", "torch")}
    assert names == {"auto": "cpu", "cpu": "cpu", "torch": "torch"}


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flashinfer", CPU, "flashinfer is not built yet"),
        ("triton", CPU, "'triton' is unknown"),
        ("cpu", torch.device("cuda"), "cannot run on cuda"),
    ],
)
def test_backend_that_cannot_run_is_refused_by_name(name: str, device: torch.device, message: str) -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    pools = attention_world(config, [(0, 1)], page_size=4).pools
    with pytest.raises(ConfigError, match=message) as error:
        make_backend(name, config, pools, device)
    assert error.value.hint is not None and "--attention-backend" in error.value.hint
