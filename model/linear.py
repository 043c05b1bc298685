"""Linear layers and the gated MLP: native kernels for decode rows, oneDNN for all others.

With native kernels weights stay as they were read, and a tied lm_head shares the embedding's memory. Without,
oneDNN gets weights packed once, which saves it the reordering on every call: float32, 8 rows, [262144, 640]
on two cores of an AVX2 machine take 76 ms instead of 300, and one row 48 instead of 54 (2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.native.linear import MAX_ROWS, LinearKernels, linear_kernels

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# oneDNN's names of the same functions: (post-op, algorithm).
_POST_OPS: Mapping[str, tuple[str, str]] = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


class Linear(Protocol):
    """y = x W^T + b for x [T, in], y [T, out] of the same dtype.

    is_decode: every row is the only one of its sequence in this step. Then a kernel for few rows may run;
    otherwise a row must come out with the same bits however many rows there are, so that what a rebuild
    computes equals what the first prefill did.
    """

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor: ...


class GatedMlp(Protocol):
    """y = (activation(x G^T) * x U^T) D^T, or as ClampedSwiglu says, for x [T, hidden], y [T, hidden].

    is_decode: as for Linear.
    """

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor: ...


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether native kernels multiply weights of `dtype` here."""
    return _kernels(dtype, device) is not None


def copies_weights(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer holds a packed copy of its weight instead of the tensor that it is made of."""
    return can_use_onednn(dtype, device) and not has_kernels(dtype, device)


def can_use_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies weights of `dtype` here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A linear layer of weight [out, in] and bias [out], the fastest that the machine can run."""
    many_rows = _many_rows(weight, bias)
    kernels = _kernels(weight.dtype, weight.device)
    return many_rows if kernels is None else NativeLinear(kernels, weight, bias, many_rows)


def make_gated_mlp(
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: Activation,
) -> GatedMlp:
    """A gated MLP. gate_up: [2 * mlp_dim, hidden], the gate's rows first. down: [hidden, mlp_dim]."""
    down_linear = _many_rows(down, down_bias)
    many_rows: GatedMlp
    if isinstance(activation, str) and can_use_onednn(gate_up.dtype, gate_up.device):
        is_packed = copies_weights(gate_up.dtype, gate_up.device)
        many_rows = FusedGatedMlp(gate_up, gate_up_bias, down_linear, activation, is_packed=is_packed)
    else:
        many_rows = PlainGatedMlp(_many_rows(gate_up, gate_up_bias), down_linear, activation)
    kernels = _kernels(gate_up.dtype, gate_up.device)
    if kernels is None:
        return many_rows
    return NativeGatedMlp(kernels, gate_up, gate_up_bias, down, down_bias, activation, many_rows)


def _kernels(dtype: torch.dtype, device: torch.device) -> LinearKernels | None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    return linear_kernels()


def _many_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if not can_use_onednn(weight.dtype, weight.device):
        return PlainLinear(weight, bias)
    return OneDnnLinear(weight, bias, is_packed=copies_weights(weight.dtype, weight.device))


class NativeLinear:
    """The kernel for the few rows of a decode step, `many_rows` for all else; both use the one weight.

    Short prefills would be quicker with it, too (a layer of Gemma 3 270M, 16 rows in bfloat16: 0.60 ms
    instead of 1.16, 2026-12), but then a rebuild's chunks would have other bits than the prefill's.
    """

    def __init__(
        self, kernels: LinearKernels, weight: torch.Tensor, bias: torch.Tensor | None, many_rows: Linear
    ) -> None:
        self._kernels = kernels
        self._weight = weight.contiguous()
        self._bias = bias
        self._many_rows = many_rows

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        if is_decode and len(x) <= MAX_ROWS:
            return self._kernels.linear(x, self._weight, self._bias)
        return self._many_rows(x, is_decode=is_decode)


class PlainLinear:
    """F.linear on the weight as it is; does not copy it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class OneDnnLinear:
    """oneDNN, never MKL: of float32 rows its bits do not depend on how many there are.

    is_packed: on a packed copy of the weight; the caller may drop the original.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_packed: bool) -> None:
        self._weight = _packed(weight) if is_packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x if is_decode else _no_single_row(x), self._weight, self._bias, "none", [], ""
        )
        return y[: len(x)]


class NativeGatedMlp:
    """One kernel call for the few rows of a decode step, `many_rows` for all else."""

    def __init__(
        self,
        kernels: LinearKernels,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: Activation,
        many_rows: GatedMlp,
    ) -> None:
        self._kernels = kernels
        self._gate_up = gate_up.contiguous()
        self._gate_up_bias = gate_up_bias
        self._down = down.contiguous()
        self._down_bias = down_bias
        self._activation = activation
        self._many_rows = many_rows

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        if is_decode and len(x) <= MAX_ROWS:
            return self._kernels.gated_mlp(
                x, self._gate_up, self._gate_up_bias, self._down, self._down_bias, self._activation
            )
        return self._many_rows(x, is_decode=is_decode)


class PlainGatedMlp:
    """Gate and up projection in one product, then the activation and the product as separate operations."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        gate, up = self._gate_up(x, is_decode=is_decode).chunk(2, dim=-1)
        if isinstance(self._activation, ClampedSwiglu):
            return self._down(_clamped_swiglu(gate, up, self._activation), is_decode=is_decode)
        return self._down(_ACTIVATIONS[self._activation](gate) * up, is_decode=is_decode)


class FusedGatedMlp:
    """The activation and the product with `up` run inside oneDNN's products: no pass over memory between.

    is_packed: as for OneDnnLinear. 512 rows of Gemma 3 270M in bfloat16, plain weights, two cores: 2.9 ms, as
    separate operations 3.8 (2026-12).
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        bias: torch.Tensor | None,
        down: Linear,
        activation: str,
        *,
        is_packed: bool,
    ) -> None:
        gate, up = gate_up.chunk(2)
        self._gate = _packed(gate) if is_packed else gate
        self._up = _packed(up) if is_packed else up
        self._gate_bias = None if bias is None else bias.chunk(2)[0]
        self._up_bias = None if bias is None else bias.chunk(2)[1]
        self._down = down
        self._post_op, self._algorithm = _POST_OPS[activation]

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        rows = x if is_decode else _no_single_row(x)
        gated = torch.ops.mkldnn._linear_pointwise(
            rows, self._gate, self._gate_bias, self._post_op, [], self._algorithm
        )
        product = torch.ops.mkldnn._linear_pointwise.binary(rows, gated, self._up, self._up_bias, "mul")
        return self._down(product, is_decode=is_decode)[: len(x)]


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _no_single_row(x: torch.Tensor) -> torch.Tensor:
    # oneDNN has a kernel of its own for one float32 row, with other bits.
    return x.repeat(2, 1) if len(x) == 1 and x.dtype == torch.float32 else x


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, activation: ClampedSwiglu) -> torch.Tensor:
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))
