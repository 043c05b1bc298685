"""The int8 kernels (int8.cpp) for tensors: products for few rows, and weights as floats again."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.native.library import library

# Inputs that share a scale. The same number as in int8.cpp.
GROUP = 64

_GATE_KINDS = {"silu": 0, "gelu_tanh": 1}
_CLAMPED_SWIGLU = 2
_POINTER, _INDEX, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A weight [num_out, num_in] as whole numbers and scales; inputs beyond the last are zeros.

    values: [num_out, groups * GROUP] int8 in [-127, 127]. scales: [num_out, groups] bfloat16. Contiguous, on
    the CPU.
    """

    values: torch.Tensor
    scales: torch.Tensor
    num_in: int

    @property
    def num_out(self) -> int:
        return len(self.values)


class Int8Kernels:
    """The functions of a loaded library. Tensors that they take are float32 or bfloat16, on the CPU."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._linear = loaded.forkpoint_int8_linear
        self._linear.argtypes = [_POINTER] * 5 + [_INDEX] * 3 + [_INT]
        self._gated_mlp = loaded.forkpoint_int8_gated_mlp
        self._gated_mlp.argtypes = [_POINTER] * 8 + [_INDEX] * 3 + [_INT, _FLOAT, _FLOAT, _INT]
        self._dequantize = loaded.forkpoint_int8_dequantize
        self._dequantize.argtypes = [_POINTER] * 3 + [_INDEX] * 2 + [_INT]
        self._quantize = loaded.forkpoint_int8_quantize
        self._quantize.argtypes = [_POINTER] * 3 + [_INDEX] * 2 + [_INT]
        for function in (self._linear, self._gated_mlp, self._dequantize, self._quantize):
            function.restype = None

    def linear(self, x: torch.Tensor, weight: Int8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b for x [T, num_in], which is rounded to int8 group by group. bias: of x's dtype."""
        x = x.contiguous()
        assert x.shape[1] == weight.num_in
        y = torch.empty((len(x), weight.num_out), dtype=x.dtype)
        self._linear(
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            _address(bias, x.dtype),
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            weight.num_in,
            weight.num_out,
            _is_bfloat16(x.dtype),
        )
        return y

    def gated_mlp(
        self,
        x: torch.Tensor,
        gate_up: Int8Matrix,
        gate_up_bias: torch.Tensor | None,
        down: Int8Matrix,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """A whole gated MLP of x [T, hidden]; between its two halves numbers are float32, then int8."""
        x = x.contiguous()
        hidden, dim = gate_up.num_in, down.num_in
        assert x.shape[1] == hidden == down.num_out and gate_up.num_out == 2 * dim
        y = torch.empty_like(x)
        clamped = activation if isinstance(activation, ClampedSwiglu) else None
        self._gated_mlp(
            gate_up.values.data_ptr(),
            gate_up.scales.data_ptr(),
            _address(gate_up_bias, x.dtype),
            down.values.data_ptr(),
            down.scales.data_ptr(),
            _address(down_bias, x.dtype),
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            hidden,
            dim,
            _GATE_KINDS[activation] if isinstance(activation, str) else _CLAMPED_SWIGLU,
            0.0 if clamped is None else clamped.alpha,
            0.0 if clamped is None else clamped.limit,
            _is_bfloat16(x.dtype),
        )
        return y

    def quantize(self, weight: torch.Tensor) -> Int8Matrix:
        """A weight [num_out, num_in] as int8, the same as model.int8.quantize makes of it."""
        weight = weight.contiguous()
        num_out, num_in = weight.shape
        num_groups = -(-num_in // GROUP)
        values = torch.empty((num_out, num_groups * GROUP), dtype=torch.int8)
        scales = torch.empty((num_out, num_groups), dtype=torch.bfloat16)
        self._quantize(
            weight.data_ptr(),
            values.data_ptr(),
            scales.data_ptr(),
            num_out,
            num_in,
            _is_bfloat16(weight.dtype),
        )
        return Int8Matrix(values, scales, num_in)

    def dequantize(self, weight: Int8Matrix, into: torch.Tensor) -> None:
        """Write the weight as floats into `into`, contiguous [num_out, num_in]."""
        assert into.is_contiguous() and into.shape == (weight.num_out, weight.num_in)
        self._dequantize(
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            into.data_ptr(),
            weight.num_out,
            weight.num_in,
            _is_bfloat16(into.dtype),
        )


def int8_kernels() -> Int8Kernels | None:
    """The kernels; None where the library is not there (library())."""
    loaded = library()
    return None if loaded is None else Int8Kernels(loaded)


def _address(bias: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    if bias is None:
        return None
    assert bias.dtype == dtype and bias.is_contiguous()
    return bias.data_ptr()


def _is_bfloat16(dtype: torch.dtype) -> bool:
    assert dtype in (torch.float32, torch.bfloat16)
    return dtype == torch.bfloat16
