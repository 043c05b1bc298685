"""Joints and placers by kernels, on every path that this processor has, against torch and float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.step_inputs import one_chunk

from forkpoint.model.config import LayerSpec, ModelConfig, Norm, RopeSpec
from forkpoint.model.heads import HeadPlacer, HeadPlacerMaker
from forkpoint.model.joint import Joint, JointMaker
from forkpoint.model.kv import KvPools
from forkpoint.model.native.library import Feature, features, only
from forkpoint.model.native.rows import RowKernels, row_kernels
from forkpoint.model.norm import FlatQkNorm, NormLayer, make_norm
from forkpoint.model.rope import RotaryTable
from forkpoint.model.step_rows import StepRows

PATHS = {"avx2": Feature.AVX2, "avx512": Feature.AVX2 | Feature.AVX512}
USABLE = [name for name, needed in PATHS.items() if needed in features()]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
NORMS: tuple[Norm, ...] = ("rms", "rms_wide", "rms_plus_one", "layer")
# A sum in another order may move a result across one rounding, and then the next one, too.
TOLERANCE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6}
NUM_PAGES, PAGE_SIZE = 40, 16

pytestmark = pytest.mark.skipif(not USABLE, reason="the native kernels are not built here")


@pytest.fixture(params=USABLE)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with only(PATHS[request.param]):
        yield request.param


def kernels(dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> RowKernels:
    found = row_kernels(dtype, kv_dtype or dtype, CPU)
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def norm_of(kind: Norm | None, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> NormLayer | None:
    return None if kind is None else make_norm(kind, random(*shape, dtype=dtype, seed=seed), 1e-5)


def joint(
    dim: int, dtype: torch.dtype, norms: tuple[Norm | None, Norm | None], multiplier: float, *, native: bool
) -> Joint:
    maker = JointMaker(dim, multiplier, dtype, kernels(dtype) if native else None)
    return maker.joint(norm_of(norms[0], (dim,), dtype, 1), norm_of(norms[1], (dim,), dtype, 2))


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---- joints


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize(
    "norms", [*((n, n) for n in NORMS), (None, None), (None, "rms"), ("rms_wide", None), ("layer", "rms")]
)
def test_joint_gives_what_torch_does(
    path: str, dtype: torch.dtype, multiplier: float, norms: tuple[Norm | None, Norm | None]
) -> None:
    for dim in (1, 15, 16, 33, 640):
        x, branch = random(5, dim, dtype=dtype, seed=3), random(5, dim, dtype=dtype, seed=4)
        own = x.clone()
        normed = joint(dim, dtype, norms, multiplier, native=True)(own, branch)
        expected_x = x.clone()
        expected = joint(dim, dtype, norms, multiplier, native=False)(expected_x, branch)
        assert_close(own, expected_x, dtype)
        assert_close(normed, expected, dtype)
        assert (normed is own) == (norms[1] is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
def test_norm_is_within_rounding_of_float64(path: str, dtype: torch.dtype, kind: Norm) -> None:
    x = random(7, 640, dtype=dtype, seed=3)
    weights = random(640, dtype=dtype, seed=2).double() + (kind == "rms_plus_one")
    normed = joint(640, dtype, (None, kind), 1.0, native=True)(x.clone(), None)
    wide = x.double()
    if kind == "layer":
        wide = wide - wide.mean(dim=-1, keepdim=True)
    exact = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weights
    # `rms` rounds twice, all others once.
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7 if kind == "rms" else 2.0**-8}[dtype]
    assert ((normed.double() - exact).abs() <= 1.01 * rounding * exact.abs() + 2.0**-22).all()


def test_joint_without_a_branch_leaves_x_alone(path: str) -> None:
    x = random(3, 40, dtype=torch.bfloat16, seed=3)
    own = x.clone()
    joint(40, torch.bfloat16, ("rms", "rms"), 0.5, native=True)(own, None)
    assert torch.equal(own, x)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 300), is_bfloat16=st.booleans(), kind=st.sampled_from(NORMS), data=st.data())
@pytest.mark.parametrize("name", USABLE)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(
    name: str, rows: int, is_bfloat16: bool, kind: Norm, data: st.DataObject
) -> None:
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    x, branch = random(rows, 640, dtype=dtype, seed=3), random(rows, 640, dtype=dtype, seed=4)
    row = data.draw(st.integers(0, rows - 1))
    with only(PATHS[name]):
        run = joint(640, dtype, (kind, kind), 1.0, native=True)
        whole_x, one_x = x.clone(), x[row : row + 1].clone()
        whole = run(whole_x, branch).clone()
        one = run(one_x, branch[row : row + 1])
    assert torch.equal(whole[row], one[0]) and torch.equal(whole_x[row], one_x[0])


@pytest.mark.skipif(len(USABLE) < 2, reason="this processor has one path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_paths_give_the_same_bits(dtype: torch.dtype) -> None:
    found = []
    for name in USABLE:
        with only(PATHS[name]):
            x = random(9, 647, dtype=dtype, seed=3)
            branch = random(9, 647, dtype=dtype, seed=4)
            found.append(joint(647, dtype, ("layer", "rms"), 0.3, native=True)(x, branch))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_row(path: str, dtype: torch.dtype, bad: float) -> None:
    x, branch = random(4, 640, dtype=dtype, seed=3), random(4, 640, dtype=dtype, seed=4)
    run = joint(640, dtype, ("rms_wide", "rms_wide"), 1.0, native=True)
    clean = run(x.clone(), branch).clone()
    branch[2, 639] = bad
    normed = run(x.clone(), branch)
    assert normed[2].isnan().any()
    assert torch.equal(normed[[0, 1, 3]], clean[[0, 1, 3]])


# ---- heads


def layer(**changes: object) -> LayerSpec:
    spec = LayerSpec(
        window=None, num_q_heads=4, num_kv_heads=2, k_dim=32, v_dim=24,
        rope=RopeSpec(theta=1e4, rotary_dim=32), attention_scale=1.0, mlp_dim=8,
    )  # fmt: skip
    return replace(spec, **changes)  # type: ignore[arg-type]


LAYERS = {
    "plain": layer(),
    "no rotation": layer(rope=None),
    "partial rotation": layer(rope=RopeSpec(theta=1e4, rotary_dim=12)),
    "interleaved": layer(rope=RopeSpec(theta=1e4, rotary_dim=32, is_interleaved=True)),
    "interleaved and partial": layer(rope=RopeSpec(theta=1e4, rotary_dim=10, is_interleaved=True)),
    "wide rotation": layer(rope=RopeSpec(theta=1e4, rotary_dim=32, is_wide=True)),
    "norm of heads": layer(qk_norm="head"),
    "norm of all heads": layer(qk_norm="flat"),
    "scaled values": layer(value_scale=0.7),
    "one head of 256": layer(num_kv_heads=1, k_dim=256, v_dim=256, qk_norm="head",
                             rope=RopeSpec(theta=1e6, rotary_dim=256)),
}  # fmt: skip


def qk_norm_of(spec: LayerSpec, kind: Norm, dtype: torch.dtype) -> NormLayer | None:
    if spec.qk_norm == "none":
        return None
    if spec.qk_norm == "head":
        return norm_of(kind, (spec.num_q_heads + spec.num_kv_heads, spec.k_dim), dtype, 1)
    q = norm_of(kind, (spec.num_q_heads * spec.k_dim,), dtype, 1)
    k = norm_of(kind, (spec.num_kv_heads * spec.k_dim,), dtype, 2)
    assert q is not None and k is not None
    return FlatQkNorm(q, k, spec.num_q_heads)


class PlacerWorld:
    """One layer with its pool, placed by kernels or by torch."""

    def __init__(
        self, spec: LayerSpec, dtype: torch.dtype, kv_dtype: torch.dtype, *, native: bool, kind: Norm = "rms"
    ) -> None:
        self.config = ModelConfig(
            family="x", vocab_size=8, hidden_size=64, layers=(spec,), norm=kind, norm_eps=1e-5, is_tied=True,
            context_length=4096, eos_token_ids=(1,), checkpoint_dtype="bfloat16",
        )  # fmt: skip
        self.pools = KvPools(
            self.config, num_pages={"full": NUM_PAGES}, page_size=PAGE_SIZE, dtype=kv_dtype, device=CPU
        )
        table = None if spec.rope is None else RotaryTable(spec.rope, 4096, dtype, CPU)
        if table is not None:
            table.reach(4000)
        maker = HeadPlacerMaker(self.pools, dtype, kernels(dtype, kv_dtype) if native else None)
        self.placer: HeadPlacer = maker.placer(0, spec, qk_norm_of(spec, kind, dtype), table)

    def place(self, qkv: torch.Tensor, start: int = 0) -> torch.Tensor:
        return self.placer(qkv, rows_of(len(qkv), start)).clone()


def rows_of(count: int, start: int) -> StepRows:
    """One sequence's rows from position `start` on, in scattered slots."""
    slots = np.random.default_rng(5).permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[start % 7 :][
        :count
    ]
    return StepRows(one_chunk(count, start, slots), CPU)


def qkv_of(spec: LayerSpec, count: int, dtype: torch.dtype) -> torch.Tensor:
    width = (spec.num_q_heads + spec.num_kv_heads) * spec.k_dim + spec.num_kv_heads * spec.v_dim
    return random(count, width, dtype=dtype, seed=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_placer_gives_what_torch_does(
    path: str, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
) -> None:
    spec = LAYERS[name]
    for kind in NORMS if spec.qk_norm != "none" else NORMS[:1]:
        native = PlacerWorld(spec, dtype, kv_dtype, native=True, kind=kind)
        plain = PlacerWorld(spec, dtype, kv_dtype, native=False, kind=kind)
        for count, start in ((1, 3001), (37, 0)):
            qkv = qkv_of(spec, count, dtype)
            assert_close(native.place(qkv, start), plain.place(qkv, start), dtype)
        # One rounding to the pool's dtype comes on top.
        coarser = torch.bfloat16 if torch.bfloat16 in (dtype, kv_dtype) else dtype
        found, expected = native.pools.slots(0), plain.pools.slots(0)
        assert_close(found.keys, expected.keys, coarser)
        assert_close(found.values, expected.values, coarser)
        assert expected.keys.any() and expected.values.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_bit_for_bit_that_of_torch(path: str, dtype: torch.dtype) -> None:
    """Without sums there is nothing that could be added up in another order."""
    for name in ("plain", "partial rotation", "interleaved", "scaled values"):
        spec = LAYERS[name]
        qkv = qkv_of(spec, 20, dtype)
        native, plain = (PlacerWorld(spec, dtype, dtype, native=native) for native in (True, False))
        if dtype == torch.bfloat16:
            assert torch.equal(native.place(qkv, 900), plain.place(qkv, 900)), name
        else:
            # torch may fuse the last product and sum.
            assert_close(native.place(qkv, 900), plain.place(qkv, 900), dtype)


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 300), is_bfloat16=st.booleans(), data=st.data())
@pytest.mark.parametrize("name", USABLE)
def test_a_placed_row_has_the_same_bits_in_any_number_of_rows(
    name: str, count: int, is_bfloat16: bool, data: st.DataObject
) -> None:
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    spec = LAYERS["one head of 256"]
    qkv = qkv_of(spec, count, dtype)
    row = data.draw(st.integers(0, count - 1))
    with only(PATHS[name]):
        whole = PlacerWorld(spec, dtype, dtype, native=True)
        one = PlacerWorld(spec, dtype, dtype, native=True)
        whole_q, one_q = whole.place(qkv), one.place(qkv[row : row + 1], row)
    assert torch.equal(whole_q[row], one_q[0])
    whole_slot = int(rows_of(count, 0).write_slots["full"][row])
    one_slot = int(rows_of(1, row).write_slots["full"][0])
    for of_whole, of_one in zip(
        (whole.pools.slots(0).keys, whole.pools.slots(0).values),
        (one.pools.slots(0).keys, one.pools.slots(0).values),
        strict=True,
    ):
        assert torch.equal(of_whole[whole_slot], of_one[one_slot])


def test_placer_writes_no_other_slot(path: str) -> None:
    spec = LAYERS["norm of heads"]
    world = PlacerWorld(spec, torch.bfloat16, torch.bfloat16, native=True)
    for pool in (world.pools.slots(0).keys, world.pools.slots(0).values):
        pool.fill_(float("nan"))
    world.place(qkv_of(spec, 30, torch.bfloat16))
    written = set(rows_of(30, 0).write_slots["full"].tolist())
    for pool in (world.pools.slots(0).keys, world.pools.slots(0).values):
        is_written = ~pool.flatten(1).isnan().any(dim=1)
        assert set(is_written.nonzero()[:, 0].tolist()) == written


def test_a_table_that_grows_keeps_its_angles() -> None:
    for spec in (RopeSpec(theta=1e4, rotary_dim=32), RopeSpec(theta=1e6, rotary_dim=256, is_wide=True)):
        grown, at_once = (RotaryTable(spec, 10_000, torch.bfloat16, CPU) for _ in range(2))
        at_once.reach(9_000)
        for reach in (1, 1_025, 5_000, 9_000):
            grown.reach(reach)
            assert len(grown.angles) >= reach
            assert torch.equal(grown.angles[:reach], at_once.angles[:reach])
