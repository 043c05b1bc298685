"""Linear layers for many rows: oneDNN on plain and packed weights, and which path a machine takes."""

from __future__ import annotations

import pytest
import torch

from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.linear import (
    FusedGatedMlp,
    OneDnnLinear,
    PlainGatedMlp,
    PlainLinear,
    can_use_onednn,
    copies_weights,
    has_kernels,
    make_gated_mlp,
    make_linear,
)

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    not can_use_onednn(torch.float32, CPU), reason="this build of torch has no oneDNN"
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.div_(shape[-1] ** 0.5)


@needs_onednn
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fused_layers_equal_plain_ones(activation: Activation, has_bias: bool, is_packed: bool) -> None:
    assert isinstance(activation, str)
    x, gate_up, down = randn(17, 48), randn(128, 48, seed=1), randn(48, 64, seed=2)
    gate_up_bias = randn(128, seed=3) if has_bias else None
    down_bias = randn(48, seed=4) if has_bias else None
    one_dnn = OneDnnLinear(down, down_bias, is_packed=is_packed)
    fused = FusedGatedMlp(gate_up, gate_up_bias, one_dnn, activation, is_packed=is_packed)
    plain_down = PlainLinear(down, down_bias)
    plain = PlainGatedMlp(PlainLinear(gate_up, gate_up_bias), plain_down, activation)
    for num_rows in (1, 17):
        torch.testing.assert_close(fused(x[:num_rows]), plain(x[:num_rows]), atol=1e-6, rtol=0)
        product = randn(num_rows, 64, seed=5)
        torch.testing.assert_close(one_dnn(product), plain_down(product), atol=1e-6, rtol=0)


# A rebuild runs other numbers of rows than the prefill whose bits it must give. 640 inputs: oneDNN's own
# kernel for one row shows from about a hundred on.
@needs_onednn
@pytest.mark.parametrize("num_in", [64, 640])
@pytest.mark.parametrize("activation", ["gelu_tanh", ClampedSwiglu(alpha=1.7, limit=7.0)])
def test_float32_rows_have_the_same_bits_however_many_there_are(activation: Activation, num_in: int) -> None:
    x = randn(130, num_in) * num_in**0.5
    weight, gate_up, down = randn(96, num_in, seed=1), randn(512, num_in, seed=2), randn(num_in, 256, seed=3)
    linear = make_linear(weight, None)
    mlp = make_gated_mlp(gate_up, None, down, None, activation)
    whole, whole_mlp = linear(x), mlp(x)
    for num_rows in (1, 2, 3, 16, 33, 64, 129):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
        assert torch.equal(mlp(x[:num_rows]), whole_mlp[:num_rows])


def test_weights_are_copied_only_where_kernels_are_missing() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert not (has_kernels(dtype, CPU) and copies_weights(dtype, CPU))
        if not has_kernels(dtype, CPU):
            assert copies_weights(dtype, CPU) == can_use_onednn(dtype, CPU)
    assert not has_kernels(torch.float16, CPU)
    assert not has_kernels(torch.float32, torch.device("cuda"))
    assert not copies_weights(torch.bfloat16, torch.device("cuda"))
