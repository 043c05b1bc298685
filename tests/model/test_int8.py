"""Int8 weights: what rounding loses, and the kernels on every path of this processor against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.configs.errors import ConfigError
from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.int8 import (
    MAX_KERNEL_ROWS,
    PIECE_NUMBERS,
    Int8Layers,
    check_int8,
    dequantize,
    int8_bytes,
    quantize,
)
from forkpoint.model.linear import make_gated_mlp, make_linear
from forkpoint.model.native.int8 import GROUP, Int8Kernels, Int8Matrix, int8_kernels
from forkpoint.model.native.library import Feature, features, only

_AVX512 = Feature.AVX2 | Feature.AVX512
PATHS = {
    "avx2": Feature.AVX2,
    "avx_vnni": Feature.AVX2 | Feature.AVX_VNNI,
    "avx512_vnni": _AVX512 | Feature.AVX512_VNNI,
    "amx": _AVX512 | Feature.AMX_INT8,
}
USABLE = [name for name, needed in PATHS.items() if needed in features()]
DTYPES = (torch.float32, torch.bfloat16)
# Half a unit in the last place, relative; and what float32 sums may lose.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SUM_ROUNDING = 2.0**-24
LEVELS = 127

needs_kernels = pytest.mark.skipif(not USABLE, reason="the native kernels are not built here")


@pytest.fixture(params=USABLE)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with only(PATHS[request.param]):
        yield request.param


def kernels() -> Int8Kernels:
    found = int8_kernels()
    assert found is not None
    return found


def uneven(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, rows of very different size: a scale that is another row's would show."""
    sizes = torch.randn(shape[0], 1, generator=generator).mul(2).exp2()
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


def grouped(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, n] as [rows, groups, GROUP], filled up with zeros."""
    padded: torch.Tensor = F.pad(numbers, (0, -numbers.shape[1] % GROUP))
    return padded.view(len(numbers), -1, GROUP)


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """x in float64 as a kernel sees it: whole numbers of 1 / 127 of the largest of each group."""
    groups = grouped(x.float())
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # Not `LEVELS / largest`: torch multiplies by the reciprocal then, which rounds twice.
    inverse = torch.full_like(largest, LEVELS).div(largest).nan_to_num(0, 0, 0)
    whole = torch.round(groups * inverse)
    return (whole.double() * (largest / LEVELS).double()).flatten(1)[:, : x.shape[1]]


def test_numbers_are_off_by_half_a_scale_at_most() -> None:
    weight = uneven(torch.Generator().manual_seed(1), 50, 150)
    matrix = quantize(weight)
    errors = grouped((dequantize(matrix, torch.float32) - weight).abs())
    scales = matrix.scales.float()
    assert (errors <= 0.5 * (1 + 1e-5) * scales[..., None]).all()
    # bfloat16 has 8 bits: rounding a scale up makes it 1 / 128 larger at most.
    largest = grouped(weight.abs()).amax(dim=-1)
    exact = largest / LEVELS
    assert (scales >= exact * (1 - 1e-6)).all() and (scales <= exact * (1 + 2**-7)).all()


def test_groups_lose_less_than_rows_would() -> None:
    weight = torch.randn(64, 640, generator=torch.Generator().manual_seed(2))
    weight[:, ::100] *= 8
    scale = weight.abs().amax(dim=1, keepdim=True) / LEVELS
    by_row = torch.round(weight / scale) * scale
    assert (dequantize(quantize(weight), torch.float32) - weight).norm() < 0.8 * (by_row - weight).norm()


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    weight = torch.ones(3, 2 * GROUP)
    weight[0] = 0
    weight[1, 0] = torch.nan
    weight[2, GROUP] = -torch.inf
    floats = dequantize(quantize(weight), torch.float32)
    assert (floats[0] == 0).all()
    assert floats[1, :GROUP].isnan().all() and floats[1, GROUP:].isfinite().all()
    assert floats[2, GROUP:].isnan().all() and floats[2, :GROUP].isfinite().all()


def test_quantising_piece_by_piece_changes_nothing() -> None:
    num_in = 4096
    weight = torch.randn(PIECE_NUMBERS // num_in + 40, num_in, generator=torch.Generator().manual_seed(3))
    whole = quantize(weight)
    tail = quantize(weight[-40:])
    assert torch.equal(whole.values[-40:], tail.values) and torch.equal(whole.scales[-40:], tail.scales)


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(
    path=st.sampled_from(USABLE or ["none"]),
    dtype=st.sampled_from(DTYPES),
    num_in=st.integers(1, 200),
    num_out=st.integers(1, 40),
    exponent=st.sampled_from([-38, -20, 0, 20, 36]),
    seed=st.integers(0, 2**16),
)
def test_kernels_round_weights_to_the_bits_of_torch(
    path: str, dtype: torch.dtype, num_in: int, num_out: int, exponent: int, seed: int
) -> None:
    weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed))
    weight = weight.mul(10.0**exponent).to(dtype)
    weight[0] = 0
    expected = quantize(weight)
    with only(PATHS[path]):
        found = kernels().quantize(weight)
        assert torch.equal(found.values, expected.values) and torch.equal(found.scales, expected.scales)
        for into_dtype in DTYPES:
            floats = torch.empty(num_out, num_in, dtype=into_dtype)
            kernels().dequantize(found, floats)
            assert torch.equal(floats, dequantize(expected, into_dtype))


@needs_kernels
def test_kernels_mark_weights_that_are_not_finite() -> None:
    weight = torch.ones(2, 100)
    weight[0, 3] = torch.nan
    weight[1, 70] = torch.inf
    found, expected = kernels().quantize(weight), quantize(weight)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scales.isnan(), torch.tensor([[True, False], [False, True]]))
    assert torch.equal(found.scales.isnan(), expected.scales.isnan())


@needs_kernels
@settings(max_examples=80, deadline=None)
@given(
    path=st.sampled_from(USABLE or ["none"]),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 40),
    num_in=st.integers(1, 200),
    num_out=st.integers(1, 100),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_of_any_shape_are_exact_to_one_rounding(
    path: str, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = uneven(generator, num_rows, num_in, dtype=dtype)
    matrix = quantize(uneven(generator, num_out, num_in))
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    seen = rounded_activations(x)
    weight = dequantize(matrix, torch.float32).double()
    exact = F.linear(seen, weight, None if bias is None else bias.double())
    # Scales of both are rounded once each; the sums of whole numbers are exact. Lanes are scaled one by one,
    # and where weights are taken as unsigned a lane has 128 of every number that another takes away again.
    offsets = matrix.scales.float().double().repeat_interleave(GROUP, dim=1)[:, :num_in] * 128
    magnitudes = seen.abs() @ (weight.abs() + offsets).T
    bound = ROUNDING[dtype] * exact.abs() + (num_in + 4) * SUM_ROUNDING * magnitudes + 1e-30
    if bias is not None:
        bound += 2 * SUM_ROUNDING * bias.double().abs()
    with only(PATHS[path]):
        y = kernels().linear(x, matrix, bias)
        assert y.shape == (num_rows, num_out) and y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound).all()
        row = seed % num_rows
        assert torch.equal(kernels().linear(x[row : row + 1], matrix, bias)[0], y[row])


@needs_kernels
def test_the_largest_products_do_not_overflow(path: str) -> None:
    """Every number at its limit, of both signs: where 16-bit sums would saturate."""
    for sign in (1, -1):
        x = torch.full((9, 3 * GROUP), 1.0)
        matrix = Int8Matrix(
            torch.full((33, 3 * GROUP), sign * LEVELS, dtype=torch.int8),
            torch.ones(33, 3, dtype=torch.bfloat16),
            3 * GROUP,
        )
        y = kernels().linear(x, matrix, None)
        assert torch.allclose(y, torch.full_like(y, float(sign * LEVELS * 3 * GROUP)), rtol=1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(limit=7.0, alpha=1.702)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlps_agree_with_float64(
    path: str, dtype: torch.dtype, activation: Activation, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, dim = 100, 150
    x = torch.randn(21, hidden, generator=generator).to(dtype)
    gate_up = quantize(torch.randn(2 * dim, hidden, generator=generator) / hidden**0.5)
    down = quantize(torch.randn(hidden, dim, generator=generator) / dim**0.5)
    biases = [torch.randn(n, generator=generator).to(dtype) if has_bias else None for n in (2 * dim, hidden)]
    y = kernels().gated_mlp(x, gate_up, biases[0], down, biases[1], activation)
    wide = [None if bias is None else bias.double() for bias in biases]
    seen = rounded_activations(x)
    gate, up = F.linear(seen, dequantize(gate_up, torch.float32).double(), wide[0]).chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        inner = (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    else:
        inner = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    down_floats = dequantize(down, torch.float32).double()
    exact = F.linear(rounded_activations(inner), down_floats, wide[1])
    # An inner number next to a half may be rounded to the other side: a step of its group; three at most.
    step = grouped(inner.abs()).amax(dim=(1, 2)) / LEVELS
    flips = 3 * step[:, None] * down_floats.abs().amax(dim=1)[None, :]
    assert ((y.double() - exact).abs() <= flips + ROUNDING[dtype] * exact.abs() + 1e-5).all()
    # So few flips that the mean does not show them: a wrong constant would.
    assert (y.double() - exact).norm() <= (3e-4 + ROUNDING[dtype]) * exact.norm()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    path: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 96, generator=generator).to(dtype)
    matrix = quantize(torch.randn(80, 96, generator=generator))
    gate_up = quantize(torch.randn(96, 96, generator=generator))
    down = quantize(torch.randn(96, 48, generator=generator))
    whole = kernels().linear(x, matrix, None)
    whole_mlp = kernels().gated_mlp(x, gate_up, None, down, None, "silu")
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for num_rows in range(1, 41):
                assert torch.equal(kernels().linear(x[:num_rows], matrix, None), whole[:num_rows])
                mlp = kernels().gated_mlp(x[:num_rows], gate_up, None, down, None, "silu")
                assert torch.equal(mlp, whole_mlp[:num_rows])
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_activations_that_are_not_finite_spoil_their_own_row_only(path: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 100, generator=generator)
    x[1, 3], x[3, 90] = torch.nan, torch.inf
    y = kernels().linear(x, quantize(torch.randn(40, 100, generator=generator)), None)
    assert y[[1, 3]].isnan().all() and y[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_prefill_equal_those_of_the_rounded_weights(with_kernels: bool, dtype: torch.dtype) -> None:
    """Bit for bit, in products of one piece or of several."""
    generator = torch.Generator().manual_seed(7)
    maker = Int8Layers(dtype, kernels() if with_kernels else None)
    x = torch.randn(70, 512, generator=generator).to(dtype)
    gate_up, down, wide = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((256, 512), (512, 128), (PIECE_NUMBERS // 512 + 100, 512))
    )
    floats = [dequantize(quantize(weight), dtype) for weight in (gate_up, down, wide)]
    bias = torch.randn(len(wide), generator=generator).to(dtype)
    assert torch.equal(maker.linear(gate_up, None)(x), make_linear(floats[0], None)(x))
    expected = make_gated_mlp(floats[0], None, floats[1], None, "silu")(x)
    assert torch.equal(maker.gated_mlp(gate_up, None, down, None, "silu")(x), expected)
    # oneDNN may add up in another order where a product is cut.
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2**-7, 0.05)
    layer = maker.linear(wide, bias)
    torch.testing.assert_close(layer(x), make_linear(floats[2], bias)(x), rtol=rtol, atol=atol)
    many = layer(x.repeat(2, 1), is_decode=True)
    assert len(many) > MAX_KERNEL_ROWS
    torch.testing.assert_close(many[:70], layer(x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_an_embedding_gives_the_rounded_rows_and_shares_them_with_its_head(with_kernels: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    table = torch.randn(300, 100, generator=generator).to(torch.bfloat16)
    embedding = Int8Layers(torch.bfloat16, kernels() if with_kernels else None).embedding(table)
    rounded = dequantize(quantize(table), torch.bfloat16)
    token_ids = torch.tensor([7, 299, 0, 7])
    assert torch.equal(embedding(token_ids), rounded[token_ids])
    x = torch.randn(3, 100, generator=generator).to(torch.bfloat16)
    logits = embedding.tied_head()(x, is_decode=True)
    exact = x.double() @ rounded.double().T
    assert (logits - exact).norm() < 0.02 * exact.norm()


def test_other_devices_than_the_cpu_are_refused() -> None:
    check_int8(torch.device("cpu"))
    with pytest.raises(ConfigError, match="for the CPU"):
        check_int8(torch.device("cuda"))


def test_bytes_are_those_of_the_tensors() -> None:
    for shape in ((3, 64), (5, 65), (7, 1)):
        matrix = quantize(torch.ones(shape))
        assert int8_bytes(*shape) == matrix.values.nbytes + matrix.scales.nbytes
