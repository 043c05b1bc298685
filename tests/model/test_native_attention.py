"""The native attention kernel, on every path that this processor has, against the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_world import CPU, AttentionWorld, attention_config, attention_world

from forkpoint.model.attention.native import NativeBackend
from forkpoint.model.attention.torch_reference import TorchReferenceBackend
from forkpoint.model.config import ModelConfig
from forkpoint.model.inputs import ForwardInput
from forkpoint.model.kv import KvPools
from forkpoint.model.native.attention import attention_kernel
from forkpoint.model.native.library import Feature, features, only

_AVX512 = Feature.AVX2 | Feature.AVX512
PATHS = {
    "avx2": Feature.AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | Feature.AVX512_BF16,
    "amx": _AVX512 | Feature.AVX512_BF16 | Feature.AMX_BF16,
}
USABLE = [name for name, needed in PATHS.items() if needed in features()]
DTYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.skipif(not USABLE, reason="the native kernels are not built here")


@pytest.fixture(params=USABLE)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with only(PATHS[request.param]):
        yield request.param


def backend(config: ModelConfig, pools: KvPools) -> NativeBackend:
    kernel = attention_kernel()
    assert kernel is not None
    return NativeBackend(config, pools, kernel)


def attend(world: AttentionWorld, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    return world.attend(backend(world.config, world.pools), layer, sinks)


def in_pool_dtype(world: AttentionWorld, dtype: torch.dtype) -> AttentionWorld:
    """The same world with its pools in another dtype."""
    pools = KvPools(
        world.config,
        num_pages=world.pools.num_pages,
        page_size=world.pools.page_size,
        dtype=dtype,
        device=CPU,
    )
    for ours, theirs in zip(pools.layers, world.pools.layers, strict=True):
        ours.keys.copy_(theirs.keys)
        ours.values.copy_(theirs.values)
    return replace(world, pools=pools)


def assert_close_to_reference(
    result: torch.Tensor, world: AttentionWorld, layer: int, sinks: torch.Tensor | None
) -> None:
    """Weights and results of bfloat16 queries may be rounded to bfloat16 once each, nothing else."""
    exact = replace(world, q=world.q.float())
    expected = exact.attend(TorchReferenceBackend(world.config, world.pools, CPU), layer, sinks)
    values = world.pools.layers[layer].values
    signed = values.clone()
    values.abs_()
    magnitudes = exact.attend(TorchReferenceBackend(world.config, world.pools, CPU), layer, sinks)
    values.copy_(signed)
    assert result.isfinite().all()
    # Sums of up to 800 terms in float32, in another order; exponents of scores up to 10.
    bound = 1e-5 * magnitudes.clamp(min=1.0)
    if result.dtype == torch.bfloat16:
        bound += 2**-8 * magnitudes + 2**-8 * expected.abs()
    assert ((result.float() - expected).abs() <= bound).all()


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from(USABLE or ["none"]),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    spans=st.lists(
        st.tuples(st.integers(0, 700), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=5
    ),
    page_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (10, 2), (7, 1)]),
    dims=st.sampled_from([(12, 8), (32, 64), (80, 96), (64, 48), (128, 128), (1, 1)]),
    window=st.sampled_from([1, 7, 40, 300]),
    num_kept_pages=st.integers(0, 2),
    softcap=st.sampled_from([None, None, 2.0]),
    has_sinks=st.booleans(),
    raises_floors=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_comes_out_as_of_the_reference(
    path: str,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    spans: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int,
    num_kept_pages: int,
    softcap: float | None,
    has_sinks: bool,
    raises_floors: bool,
    seed: int,
) -> None:
    config = attention_config(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        softcap=softcap,
        k_dim=dims[0],
        v_dim=dims[1],
        window=window,
    )
    # Somewhere between the lowest key of the first row's window and the first row.
    floors = [max(0, start - (seed % window)) if raises_floors else 0 for start, _ in spans]
    world = attention_world(
        config,
        spans,
        page_size=page_size,
        num_kept_pages=0 if raises_floors else num_kept_pages,
        floors=floors,
        dtype=dtype,
        seed=seed,
    )
    world = in_pool_dtype(world, pool_dtype)
    sinks = torch.linspace(-1.0, 2.0, heads[0]) if has_sinks else None
    chosen = torch.from_numpy(
        np.random.default_rng(seed).permutation(len(world.q))[: 1 + seed % len(world.q)]
    )
    for layer in (0, 1):
        with only(PATHS[path]):
            native = backend(config, world.pools)
            result = world.attend(native, layer, sinks)
            some = native.attend(world.q[chosen], layer, sinks, rows=chosen)
        assert result.dtype == dtype
        assert_close_to_reference(result, world, layer, sinks)
        whole = result.clone()
        whole[chosen] = some
        assert_close_to_reference(whole, world, layer, sinks)


def part_of(world: AttentionWorld, first: int, end: int) -> AttentionWorld:
    """Rows [first, end) of a world with one sequence."""
    inputs = world.inputs
    part = ForwardInput(
        token_ids=inputs.token_ids[first:end],
        positions=inputs.positions[first:end],
        q_indptr=np.array([0, end - first], dtype=np.int32),
        full_hits=inputs.full_hits,
        tables=inputs.tables,
        sample_rows=inputs.sample_rows,
    )
    return replace(world, inputs=part, q=world.q[first:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_how_a_prompt_is_cut(path: str, dtype: torch.dtype) -> None:
    # A window longer than a block of the kernel's keys, so that sums go on from one block to the next.
    config = attention_config(num_q_heads=6, num_kv_heads=2, k_dim=64, v_dim=64, window=300)
    world = attention_world(config, [(37, 600)], page_size=4, dtype=dtype)
    for layer in (0, 1):
        whole = attend(world, layer)
        for cuts in ([0, 2, 5, 64, 131, 598, 600], [0, 350, 600], [0, 33, 600]):
            parts = [part_of(world, first, end) for first, end in zip(cuts, cuts[1:], strict=False)]
            assert torch.equal(torch.cat([attend(part, layer) for part in parts]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_neighbours_or_threads(path: str, dtype: torch.dtype) -> None:
    config = attention_config(num_q_heads=5, num_kv_heads=1, k_dim=64, v_dim=64, window=90)
    spans = [(500, 1), (0, 70), (900, 1), (333, 40), (20, 1)]
    world = attention_world(config, spans, page_size=16, dtype=dtype)
    native = backend(config, world.pools)
    num_threads = torch.get_num_threads()
    for layer in (0, 1):
        whole = world.attend(native, layer)
        for first, end in zip(world.inputs.q_indptr, world.inputs.q_indptr[1:], strict=False):
            rows = torch.arange(first, end)
            assert torch.equal(native.attend(world.q[rows], layer, rows=rows), whole[rows])
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(native.attend(world.q, layer), whole)
        finally:
            torch.set_num_threads(num_threads)


def test_a_damaged_row_stays_alone(path: str) -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=1, k_dim=32, v_dim=32, window=90)
    world = attention_world(config, [(60, 50), (300, 1)], page_size=4, dtype=torch.bfloat16)
    for layer in (0, 1):
        whole = attend(world, layer)
        damaged = world.q.clone()
        damaged[[7, 50]] = torch.nan
        result = attend(replace(world, q=damaged), layer)
        assert result[[7, 50]].isnan().all()
        others = [row for row in range(51) if row not in (7, 50)]
        assert torch.equal(result[others], whole[others])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"first_position": np.array([21], dtype=np.int32)},
            r"lists \[21, 28\), \[14, 21\)",
        ),
        (
            {"last_page_len": np.array([0], dtype=np.int32)},
            r"lists \[14, 20\), \[14, 21\)",
        ),
        ({"kv_pages": np.array([999] * 7, dtype=np.int32)}, "unknown pages"),
    ],
)
def test_tables_that_lack_a_key_are_caught(changes: dict[str, np.ndarray], message: str) -> None:
    config = attention_config(num_q_heads=4, num_kv_heads=2)
    world = attention_world(config, [(20, 1)], page_size=1)
    short = replace(world.inputs.tables["swa"], **changes)
    wrong = replace(world, inputs=replace(world.inputs, tables={**world.inputs.tables, "swa": short}))
    with pytest.raises(AssertionError, match=message):
        attend(wrong, 1)
