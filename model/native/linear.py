"""The kernels of linear.cpp for tensors: float32 and bfloat16 products for the few rows of a decode step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache

import torch

from forkpoint.model.config import Activation, ClampedSwiglu
from forkpoint.model.native.library import library

# More rows than this are torch's: its products for many rows are better.
MAX_ROWS = 64

_GATE_KINDS: Mapping[str, int] = {"silu": 0, "gelu_tanh": 1}
_CLAMPED_SWIGLU = 2
_POINTER, _INDEX, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class LinearKernels:
    """The functions of a loaded library. Tensors are all float32 or all bfloat16, on the CPU."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._linear = loaded.forkpoint_linear
        self._linear.argtypes = [_POINTER] * 4 + [_INDEX] * 3 + [_INT]
        self._linear.restype = None
        self._gated_mlp = loaded.forkpoint_gated_mlp
        self._gated_mlp.argtypes = [_POINTER] * 6 + [_INDEX] * 3 + [_INT, _FLOAT, _FLOAT, _INT]
        self._gated_mlp.restype = None

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b for x [T, in], weight [out, in] contiguous, bias [out]. Returns [T, out].

        A row comes out with the same bits whatever T is. Sums are float32 and rounded once.
        """
        num_out, num_in = weight.shape
        assert x.shape[1] == num_in and x.dtype == weight.dtype
        x = x.contiguous()
        y = x.new_empty((len(x), num_out))
        self._linear(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            num_in,
            num_out,
            x.dtype == torch.bfloat16,
        )
        return y

    def gated_mlp(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """A whole gated MLP of x [T, hidden]. gate_up: [2 * dim, hidden]; down: [hidden, dim]; contiguous.

        A row comes out with the same bits whatever T is. Between the two products numbers are rounded once
        at most.
        """
        hidden, dim = down.shape
        assert x.shape[1] == hidden and gate_up.shape == (2 * dim, hidden) and x.dtype == down.dtype
        x = x.contiguous()
        y = torch.empty_like(x)
        clamped = activation if isinstance(activation, ClampedSwiglu) else None
        self._gated_mlp(
            gate_up.data_ptr(),
            None if gate_up_bias is None else gate_up_bias.data_ptr(),
            down.data_ptr(),
            None if down_bias is None else down_bias.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            hidden,
            dim,
            _GATE_KINDS[activation] if isinstance(activation, str) else _CLAMPED_SWIGLU,
            0.0 if clamped is None else clamped.alpha,
            0.0 if clamped is None else clamped.limit,
            x.dtype == torch.bfloat16,
        )
        return y


@lru_cache(maxsize=1)
def linear_kernels() -> LinearKernels | None:
    """The kernels; None where the library is not there (library())."""
    loaded = library()
    return None if loaded is None else LinearKernels(loaded)
