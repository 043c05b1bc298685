"""Linear layers and the gated MLP, plain or with weights packed once for oneDNN.

Packed weights save oneDNN the reordering on every call: float32, 8 rows, [262144, 640] on two cores of an
AVX2 machine take 76 ms instead of 300, and one row 48 instead of 54 (2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from forkpoint.model.config import Activation, ClampedSwiglu

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


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold packed weights of `dtype` here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A linear layer of weight [out, in] and bias [out]; packed where the machine can."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def make_gated_mlp(
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: Activation,
) -> GatedMlp:
    """A gated MLP. gate_up: [2 * mlp_dim, hidden], the gate's rows first. down: [hidden, mlp_dim]."""
    down_linear = make_linear(down, down_bias)
    if isinstance(activation, str) and can_pack(gate_up.dtype, gate_up.device):
        return PackedGatedMlp(gate_up, gate_up_bias, down_linear, activation)
    return PlainGatedMlp(make_linear(gate_up, gate_up_bias), down_linear, activation)


class PlainLinear:
    """F.linear on the weight as it is; does not copy it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN on a packed copy of the weight; the caller may drop the original."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


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


class PackedGatedMlp:
    """The activation and the product with `up` run inside oneDNN's products: no pass over memory between."""

    def __init__(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, down: Linear, activation: str
    ) -> None:
        gate, up = gate_up.chunk(2)
        self._gate = torch.ops.mkldnn._reorder_linear_weight(gate)
        self._up = torch.ops.mkldnn._reorder_linear_weight(up)
        self._gate_bias = None if bias is None else bias.chunk(2)[0]
        self._up_bias = None if bias is None else bias.chunk(2)[1]
        self._down = down
        self._post_op, self._algorithm = _POST_OPS[activation]

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        gated = torch.ops.mkldnn._linear_pointwise(
            x, self._gate, self._gate_bias, self._post_op, [], self._algorithm
        )
        product = torch.ops.mkldnn._linear_pointwise.binary(x, gated, self._up, self._up_bias, "mul")
        return self._down(product, is_decode=is_decode)


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, activation: ClampedSwiglu) -> torch.Tensor:
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))
