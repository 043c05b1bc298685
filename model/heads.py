"""From the output of the qkv product to attention: heads are normed and rotated, keys and values stored."""

from __future__ import annotations

from typing import Protocol

import torch

from forkpoint.model.config import LayerSpec
from forkpoint.model.kv import KvPools
from forkpoint.model.native.rows import GrowingBuffer, PlaceCall, RowKernels
from forkpoint.model.norm import NormLayer, heads_norm_parameters
from forkpoint.model.rope import RotaryTable, rotate
from forkpoint.model.step_rows import StepRows


class HeadPlacer(Protocol):
    """Puts the heads of one layer where attention looks for them."""

    def __call__(self, qkv: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Store the keys and values of all `rows` in the layer's pool, in its dtype.

        qkv: [T, (Hq + Hkv) * k_dim + Hkv * v_dim]. Returns q [T, Hq, k_dim], normed and rotated, valid until
        the next layer's call.
        """
        ...


class HeadPlacerMaker:
    """Makes the placers of one model: by kernels where they are, else of torch operations."""

    def __init__(self, pools: KvPools, dtype: torch.dtype, kernels: RowKernels | None) -> None:
        self._pools = pools
        self._dtype = dtype
        self._kernels = kernels
        # One for all layers: attention has taken one layer's q when the next one's comes.
        self._buffer = GrowingBuffer(dtype)

    def placer(
        self, layer: int, spec: LayerSpec, qk_norm: NormLayer | None, table: RotaryTable | None
    ) -> HeadPlacer:
        """qk_norm: of [T, Hq + Hkv, k_dim]. table: the angles of spec.rope."""
        if self._kernels is None:
            return TorchPlacer(self._pools, layer, spec, qk_norm, table)
        norm = None if qk_norm is None else heads_norm_parameters(qk_norm)
        call = self._kernels.place_call(self._dtype, spec, norm, self._pools.slots(layer))
        return NativePlacer(call, self._buffer, spec, table)


class TorchPlacer:
    """One operation after the other."""

    def __init__(
        self,
        pools: KvPools,
        layer: int,
        spec: LayerSpec,
        qk_norm: NormLayer | None,
        table: RotaryTable | None,
    ) -> None:
        self._pools = pools
        self._layer = layer
        self._spec = spec
        self._qk_norm = qk_norm
        self._table = table

    def __call__(self, qkv: torch.Tensor, rows: StepRows) -> torch.Tensor:
        spec = self._spec
        qk_dim = (spec.num_q_heads + spec.num_kv_heads) * spec.k_dim
        # q and k side by side: one norm and one rotation for both.
        qk = qkv[:, :qk_dim].view(len(qkv), -1, spec.k_dim)
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        if self._table is not None:
            qk = rotate(qk, rows.rotation(self._table))
        values = qkv[:, qk_dim:].view(len(qkv), -1, spec.v_dim)
        if spec.value_scale != 1.0:
            values = values * spec.value_scale
        self._pools.write(self._layer, rows.write_slots[spec.kind], qk[:, spec.num_q_heads :], values)
        return qk[:, : spec.num_q_heads]


class NativePlacer:
    """All of it in one pass over the rows."""

    def __init__(
        self, call: PlaceCall, buffer: GrowingBuffer, spec: LayerSpec, table: RotaryTable | None
    ) -> None:
        self._call = call
        self._buffer = buffer
        self._spec = spec
        self._table = table

    def __call__(self, qkv: torch.Tensor, rows: StepRows) -> torch.Tensor:
        q = self._buffer.rows((len(qkv), self._spec.num_q_heads, self._spec.k_dim))
        angles = None if self._table is None else self._table.angles
        self._call(qkv, q, rows.positions, rows.write_slots[self._spec.kind], angles)
        return q
