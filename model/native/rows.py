"""The kernels of rows.cpp for tensors: what lies between a layer's products."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from forkpoint.model.config import LayerSpec
from forkpoint.model.kv import LayerKv
from forkpoint.model.native.library import library

_POINTER, _INDEX, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_DTYPES = (torch.float32, torch.bfloat16)
_NORM_KINDS = {"rms": 1, "rms_wide": 2, "layer": 3}


@dataclass(frozen=True, slots=True)
class NormParameters:
    """A norm as the kernels take it.

    kind `rms`: rounded before its weight is multiplied; `rms_wide`: after; `layer`: of x less its mean.
    weights: [D], or [H, D] for heads.
    """

    kind: Literal["rms", "rms_wide", "layer"]
    weights: torch.Tensor
    eps: float


class _Joint(ctypes.Structure):
    """The same fields as in rows.cpp."""

    _fields_ = (
        ("dim", _INDEX),
        ("multiplier", _FLOAT),
        ("branch_eps", _FLOAT),
        ("next_eps", _FLOAT),
        ("branch_norm", _INT),
        ("next_norm", _INT),
        ("branch_weights", _POINTER),
        ("next_weights", _POINTER),
        ("is_bfloat16", _INT),
    )


class _Heads(ctypes.Structure):
    """The same fields as in rows.cpp."""

    _fields_ = (
        ("num_q_heads", _INDEX),
        ("num_kv_heads", _INDEX),
        ("k_dim", _INDEX),
        ("v_dim", _INDEX),
        ("rotary_dim", _INDEX),
        ("weights", _POINTER),
        ("eps", _FLOAT),
        ("norm", _INT),
        ("is_flat", _INT),
        ("is_interleaved", _INT),
        ("is_wide", _INT),
        ("value_scale", _FLOAT),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("pool_is_bfloat16", _INT),
        ("is_bfloat16", _INT),
    )


class _HeadRows(ctypes.Structure):
    """The same fields as in rows.cpp."""

    _fields_ = (
        ("qkv", _POINTER),
        ("q", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("angles", _POINTER),
        ("count", _INDEX),
    )


class JoinCall:
    """One joint of the model (joint.py): x += multiplier * norm(branch) in place, then the norm of x."""

    def __init__(
        self,
        function: ctypes._NamedFuncPointer,
        dtype: torch.dtype,
        dim: int,
        multiplier: float,
        branch_norm: NormParameters | None,
        next_norm: NormParameters | None,
    ) -> None:
        self._function = function
        self._dtype = dtype
        self._dim = dim
        # The struct holds addresses: the weights must live as long.
        self._weights = (_weights_of(branch_norm), _weights_of(next_norm))
        for norm, weights in zip((branch_norm, next_norm), self._weights, strict=True):
            assert norm is None or weights is not None and weights.numel() == dim
        self._struct = _Joint(
            dim,
            multiplier,
            0.0 if branch_norm is None else branch_norm.eps,
            0.0 if next_norm is None else next_norm.eps,
            _kind_of(branch_norm),
            _kind_of(next_norm),
            _address(self._weights[0]),
            _address(self._weights[1]),
            dtype == torch.bfloat16,
        )

    def __call__(self, x: torch.Tensor, branch: torch.Tensor | None, normed: torch.Tensor | None) -> None:
        """x: [T, dim], written; branch: [T, dim] or None; normed: [T, dim], written where there is a norm.

        x and normed are contiguous.
        """
        assert x.shape[1] == self._dim and x.dtype == self._dtype and x.is_contiguous()
        assert branch is None or (branch.shape == x.shape and branch.dtype == x.dtype)
        assert normed is None or (normed.shape == x.shape and normed.dtype == x.dtype)
        branch = None if branch is None else branch.contiguous()
        self._function(ctypes.byref(self._struct), _address(branch), x.data_ptr(), _address(normed), len(x))


class PlaceCall:
    """One layer's heads (heads.py): q, k and v from the output of their product to where they belong."""

    def __init__(
        self,
        function: ctypes._NamedFuncPointer,
        dtype: torch.dtype,
        spec: LayerSpec,
        norm: NormParameters | None,
        pool: LayerKv,
    ) -> None:
        """norm: weights [Hq + Hkv, k_dim]. pool: the layer's slots."""
        assert pool.keys.is_contiguous() and pool.values.is_contiguous()
        self._function = function
        self._dtype = dtype
        self._size = (spec.num_q_heads + spec.num_kv_heads) * spec.k_dim + spec.num_kv_heads * spec.v_dim
        self._has_rope = spec.rope is not None
        # The struct holds addresses: what they point at must live as long.
        self._weights, self._pool = _weights_of(norm), pool
        assert norm is None or norm.weights.numel() == (spec.num_q_heads + spec.num_kv_heads) * spec.k_dim
        self._struct = _Heads(
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.k_dim,
            spec.v_dim,
            0 if spec.rope is None else spec.rope.rotary_dim,
            _address(self._weights),
            0.0 if norm is None else norm.eps,
            _kind_of(norm),
            spec.qk_norm == "flat",
            spec.rope is not None and spec.rope.is_interleaved,
            spec.rope is not None and spec.rope.is_wide,
            spec.value_scale,
            pool.keys.data_ptr(),
            pool.values.data_ptr(),
            pool.keys.dtype == torch.bfloat16,
            dtype == torch.bfloat16,
        )

    def __call__(
        self,
        qkv: torch.Tensor,
        q: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        angles: torch.Tensor | None,
    ) -> None:
        """qkv: [T, (Hq + Hkv) * k_dim + Hkv * v_dim]. q: [T, Hq, k_dim], contiguous, written.

        positions, slots: [T] int64, contiguous. angles: [P, rotary_dim] float32 (RotaryTable.angles) where
        the layer rotates; P is larger than any position.
        """
        assert qkv.shape[1] == self._size and qkv.dtype == q.dtype == self._dtype and q.is_contiguous()
        assert len(qkv) == len(q) == len(positions) == len(slots) and (angles is not None) == self._has_rope
        qkv = qkv.contiguous()
        rows = _HeadRows(
            qkv.data_ptr(), q.data_ptr(), positions.data_ptr(), slots.data_ptr(), _address(angles), len(qkv)
        )
        self._function(ctypes.byref(self._struct), ctypes.byref(rows))


class RowKernels:
    """The functions of a loaded library, for rows of float32 or bfloat16 on the CPU and pools of either."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._join = loaded.forkpoint_join
        self._join.argtypes = [ctypes.POINTER(_Joint), _POINTER, _POINTER, _POINTER, _INDEX]
        self._join.restype = None
        self._place = loaded.forkpoint_place_heads
        self._place.argtypes = [ctypes.POINTER(_Heads), ctypes.POINTER(_HeadRows)]
        self._place.restype = None

    def join_call(
        self,
        dtype: torch.dtype,
        dim: int,
        multiplier: float,
        branch_norm: NormParameters | None,
        next_norm: NormParameters | None,
    ) -> JoinCall:
        """The call for one joint."""
        return JoinCall(self._join, dtype, dim, multiplier, branch_norm, next_norm)

    def place_call(
        self, dtype: torch.dtype, spec: LayerSpec, norm: NormParameters | None, pool: LayerKv
    ) -> PlaceCall:
        """The call for one layer's heads."""
        return PlaceCall(self._place, dtype, spec, norm, pool)


class GrowingBuffer:
    """Memory for the rows of a step that every layer uses anew: a fresh one for each costs page faults."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype)
        self._last = self._flat

    def rows(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of this shape, not initialised; the next call gives the same memory."""
        # All layers of a step ask for the same: a view is made once.
        if self._last.shape != shape:
            size = math.prod(shape)
            if size > len(self._flat):
                self._flat = torch.empty(size, dtype=self._flat.dtype)
            self._last = self._flat[:size].view(shape)
        return self._last


@lru_cache(maxsize=1)
def _loaded_kernels() -> RowKernels | None:
    loaded = library()
    return None if loaded is None else RowKernels(loaded)


def row_kernels(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> RowKernels | None:
    """The kernels for such rows and pools; None where there are none, or the library is not there."""
    if device.type != "cpu" or dtype not in _DTYPES or kv_dtype not in _DTYPES:
        return None
    return _loaded_kernels()


def _weights_of(norm: NormParameters | None) -> torch.Tensor | None:
    return None if norm is None else norm.weights.float().contiguous()


def _kind_of(norm: NormParameters | None) -> int:
    return 0 if norm is None else _NORM_KINDS[norm.kind]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
