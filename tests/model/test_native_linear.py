"""The native products for few rows, on every path that this processor has, against float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.linear import make_gated_mlp, make_linear
from forkpoint.model.native.library import Feature, features, only
from forkpoint.model.native.linear import MAX_ROWS, LinearKernels, linear_kernels

_AVX512 = Feature.AVX2 | Feature.AVX512
PATHS = {
    "avx2": Feature.AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | Feature.AVX512_BF16,
    "amx": _AVX512 | Feature.AVX512_BF16 | Feature.AMX_BF16,
}
USABLE = [name for name, needed in PATHS.items() if needed in features()]
DTYPES = (torch.float32, torch.bfloat16)
# Half a unit in the last place, relative; and what float32 sums may lose.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SUM_ROUNDING = 2.0**-24

pytestmark = pytest.mark.skipif(not USABLE, reason="the native kernels are not built here")


@pytest.fixture(params=USABLE)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with only(PATHS[request.param]):
        yield request.param


def kernels() -> LinearKernels:
    found = linear_kernels()
    assert found is not None
    return found


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close_to_exact(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitudes = x.double().abs() @ weight.double().abs().T
    bound = ROUNDING[y.dtype] * exact.abs() + x.shape[1] * SUM_ROUNDING * magnitudes + 1e-30
    if bias is not None:
        bound += SUM_ROUNDING * bias.double().abs()
    assert ((y.double() - exact).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from(USABLE or ["none"]),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 70),
    num_in=st.integers(1, 200),
    num_out=st.integers(1, 100),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_of_any_shape_are_exact_to_one_rounding(
    path: str, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = randn(generator, num_rows, num_in, dtype=dtype)
    weight = randn(generator, num_out, num_in, dtype=dtype)
    bias = randn(generator, num_out, dtype=dtype) if has_bias else None
    with only(PATHS[path]):
        y = kernels().linear(x, weight, bias)
        assert y.shape == (num_rows, num_out) and y.dtype == dtype
        assert_close_to_exact(y, x, weight, bias)
        row = seed % num_rows
        assert torch.equal(kernels().linear(x[row : row + 1], weight, bias)[0], y[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_number_of_rows(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = randn(generator, 70, 96, dtype=dtype)
    weight = randn(generator, 80, 96, dtype=dtype)
    gate_up, down = randn(generator, 96, 96, dtype=dtype), randn(generator, 96, 48, dtype=dtype)
    whole = kernels().linear(x, weight, None)
    whole_mlp = kernels().gated_mlp(x, gate_up, None, down, None, "silu")
    for num_rows in range(1, 71):
        assert torch.equal(kernels().linear(x[:num_rows], weight, None), whole[:num_rows])
        mlp = kernels().gated_mlp(x[:num_rows], gate_up, None, down, None, "silu")
        assert torch.equal(mlp, whole_mlp[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = randn(generator, 5, 128, dtype=dtype), randn(generator, 1000, 128, dtype=dtype)
    gate_up, down = randn(generator, 400, 128, dtype=dtype), randn(generator, 128, 200, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            mlp = kernels().gated_mlp(x, gate_up, None, down, None, "gelu_tanh")
            results.append((kernels().linear(x, weight, None), mlp))
    finally:
        torch.set_num_threads(before)
    for y, mlp in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(mlp, results[0][1])


# Two OpenMP runtimes in one process have a pool of threads each, which spin against one another.
_ONE_POOL = """
import os, torch
from forkpoint.model.native.linear import linear_kernels

torch.set_num_threads(3)
x, weight = torch.ones(40, 512), torch.ones(4096, 512)
x @ weight.T
threads = len(os.listdir("/proc/self/task"))
linear_kernels().linear(x, weight, None)
print(len(os.listdir("/proc/self/task")) - threads)
maps = [os.path.basename(line.split()[-1]) for line in open("/proc/self/maps")]
print(*{name for name in maps if "omp" in name})
"""


def test_kernels_run_on_the_threads_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _ONE_POOL], check=True, capture_output=True, text=True)
    num_new_threads, runtimes = done.stdout.splitlines()
    assert num_new_threads == "0"
    assert len(runtimes.split()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 40])
def test_a_view_with_strides_gives_what_its_copy_gives(path: str, dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = randn(generator, num_rows, 130, dtype=dtype)
    weight = randn(generator, 20, 65, dtype=dtype)
    down = randn(generator, 65, 10, dtype=dtype)
    for view in (wide[:, ::2], wide[:, 65:], wide[:, :65]):
        copy = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(kernels().linear(view, weight, None), kernels().linear(copy, weight, None))
        mlp = kernels().gated_mlp(view, weight, None, down, None, "silu")
        assert torch.equal(mlp, kernels().gated_mlp(copy, weight, None, down, None, "silu"))


# 40 inputs and 24 outputs: the strange numbers lie in full steps and in the tails, as do their neighbours.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_strange_numbers_come_out_where_torch_has_them(path: str, dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = randn(generator, num_rows, 40, dtype=dtype), randn(generator, 24, 40, dtype=dtype)
    for value in (float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).max):
        for place in (0, 39):
            strange_x, strange_weight = x.clone(), weight.clone()
            strange_x[-1, place] = value
            strange_weight[-1, place] = value
            for a, b in ((strange_x, weight), (x, strange_weight), (strange_x, strange_weight)):
                y = kernels().linear(a, b, None).float()
                exact = F.linear(a.double(), b.double()).to(dtype).float()
                assert torch.equal(y.isnan(), exact.isnan())
                assert torch.equal(y.isposinf(), exact.isposinf())
                assert torch.equal(y.isneginf(), exact.isneginf())


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ClampedSwiglu(alpha=1.702, limit=1.5): lambda gate, up: (
        (up.clamp(-1.5, 1.5) + 1) * gate.clamp(max=1.5) * torch.sigmoid(1.702 * gate.clamp(max=1.5))
    ),
}


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from(USABLE or ["none"]),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(list(ACTIVATIONS)),
    num_rows=st.integers(1, 70),
    hidden=st.integers(1, 150),
    dim=st.integers(1, 150),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gated_mlps_of_any_shape_are_close_to_exact_ones(
    path: str,
    dtype: torch.dtype,
    activation: Activation,
    num_rows: int,
    hidden: int,
    dim: int,
    has_bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = randn(generator, num_rows, hidden, dtype=dtype)
    gate_up = randn(generator, 2 * dim, hidden, dtype=dtype) / 8
    down = randn(generator, hidden, dim, dtype=dtype)
    gate_up_bias = randn(generator, 2 * dim, dtype=dtype) if has_bias else None
    down_bias = randn(generator, hidden, dtype=dtype) if has_bias else None
    with only(PATHS[path]):
        y = kernels().gated_mlp(x, gate_up, gate_up_bias, down, down_bias, activation)
        row = seed % num_rows
        alone = kernels().gated_mlp(x[row : row + 1], gate_up, gate_up_bias, down, down_bias, activation)
    assert torch.equal(alone[0], y[row])

    both = F.linear(x.double(), gate_up.double(), None if gate_up_bias is None else gate_up_bias.double())
    joined = ACTIVATIONS[activation](*both.chunk(2, dim=-1))
    exact = F.linear(joined, down.double(), None if down_bias is None else down_bias.double())
    # The joined numbers are rounded once at most, the result once; float32 sums lose less than 150 roundings
    # of the largest terms, and so do gate and up, which the activation and the product make larger.
    magnitudes = (joined.abs() + both.abs().amax(dim=-1, keepdim=True) * 4) @ down.double().abs().T
    bound = ROUNDING[dtype] * (joined.abs() @ down.double().abs().T + exact.abs())
    assert ((y.double() - exact).abs() <= bound + 150 * SUM_ROUNDING * magnitudes + 1e-30).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_exact_to_a_few_units_in_the_last_place(path: str, activation: Activation) -> None:
    # An MLP of width one whose `up` is 1 and whose `down` is 1 gives the activation itself.
    gate_up, gate_up_bias, down = (
        torch.tensor([[1.0], [0.0]]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[1.0]]),
    )
    x = torch.cat([torch.linspace(-80, 80, 6400), torch.linspace(-1, 1, 6400), torch.tensor([0.0, 1e-30])])[
        :, None
    ]
    y = kernels().gated_mlp(x, gate_up, gate_up_bias, down, None, activation).double()
    u = x.double()
    if activation == "gelu_tanh":
        u = 2 * (2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3)
    exact = x.double() * torch.sigmoid(u)
    # Far below zero the sigmoid's error grows with its argument's, which is float32, too.
    allowed = 2.0**-22 * (2 + u.clamp(max=0).abs().clamp(max=87))
    assert ((y - exact).abs() <= allowed * exact.abs() + 1e-34).all()


def test_decode_rows_take_the_kernels_and_others_do_not() -> None:
    generator = torch.Generator().manual_seed(5)
    x = randn(generator, MAX_ROWS + 1, 640, dtype=torch.float32)
    weight = randn(generator, 700, 640, dtype=torch.float32)
    down = randn(generator, 640, 350, dtype=torch.float32)
    linear, mlp = make_linear(weight, None), make_gated_mlp(weight, None, down, None, "silu")
    few = x[:MAX_ROWS]
    own, own_mlp = (
        kernels().linear(few, weight, None),
        kernels().gated_mlp(few, weight, None, down, None, "silu"),
    )
    assert torch.equal(linear(few, is_decode=True), own)
    assert torch.equal(mlp(few, is_decode=True), own_mlp)
    # Sums in another order: other bits.
    assert not torch.equal(linear(few), own)
    assert not torch.equal(mlp(few), own_mlp)
    torch.testing.assert_close(linear(few), own, rtol=0, atol=1e-3)
    torch.testing.assert_close(linear(x, is_decode=True), linear(x), rtol=0, atol=0)
