"""The kernel of attention.cpp for tensors: attention of any ragged batch straight over the paged pools."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.config import LayerSpec
from forkpoint.model.inputs import ForwardInput, KindTable
from forkpoint.model.kv import LayerKv
from forkpoint.model.native.library import library

DTYPES = (torch.float32, torch.bfloat16)


class Layer(ctypes.Structure):
    """Layer of attention_job.h: one layer's pools and numbers. The pools must outlive it."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_q_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("k_dim", ctypes.c_int64),
        ("v_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("q_is_bfloat16", ctypes.c_int32),
        ("kv_is_bfloat16", ctypes.c_int32),
    )

    @classmethod
    def of(cls, spec: LayerSpec, slots: LayerKv) -> Layer:
        """slots: the layer's pool as [slots, Hkv, D], float32 or bfloat16."""
        assert slots.keys.is_contiguous() and slots.values.is_contiguous()
        assert slots.keys.dtype == slots.values.dtype and slots.keys.dtype in DTYPES
        return cls(
            keys=slots.keys.data_ptr(),
            values=slots.values.data_ptr(),
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            window=spec.window or 0,
            scale=spec.attention_scale,
            softcap=spec.softcap or 0.0,
            kv_is_bfloat16=slots.keys.dtype == torch.bfloat16,
        )


class Batch(ctypes.Structure):
    """Batch of attention_job.h: the rows of a step and one kind's page tables, as the step holds them."""

    _fields_ = (
        ("num_sequences", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("q_indptr", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("kv_pages", ctypes.c_void_p),
        ("first_position", ctypes.c_void_p),
        ("lowest_key", ctypes.c_void_p),
    )
    # What the pointers point to stays as long as they do.
    arrays: Mapping[str, NDArray[np.int32]]

    @classmethod
    def of(cls, inputs: ForwardInput, table: KindTable, page_size: int) -> Batch:
        arrays = {
            "q_indptr": inputs.q_indptr,
            "positions": inputs.positions,
            "kv_indptr": table.kv_indptr,
            "kv_pages": table.kv_pages,
            "first_position": table.first_position,
            "lowest_key": table.lowest_key,
        }
        arrays = {name: np.ascontiguousarray(array, dtype=np.int32) for name, array in arrays.items()}
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        batch = cls(num_sequences=inputs.num_sequences, page_size=page_size, **pointers)
        batch.arrays = arrays
        return batch


class AttentionKernel:
    """The function of a loaded library."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._attend = loaded.forkpoint_attention
        pointer = ctypes.c_void_p
        self._attend.argtypes = [pointer, pointer, pointer, pointer, pointer, pointer, ctypes.c_int64]
        self._attend.restype = None

    def attend(
        self,
        layer: Layer,
        batch: Batch,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """As AttentionBackend.attend, of q [N, Hq, k_dim] float32 or bfloat16; by one thread at a time.

        A row has the same bits in every chunk, batch and number of threads, except that a sequence's only row
        in a call is summed in another order than a row among several.
        """
        assert q.dtype in DTYPES and q.shape[1:] == (layer.num_q_heads, layer.k_dim)
        num_rows = len(batch.arrays["positions"])
        if rows is not None:
            assert rows.dtype == torch.int64
            rows, num_rows = rows.contiguous(), len(rows)
        assert len(q) == num_rows
        q = q.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = q.new_empty((len(q), layer.num_q_heads, layer.v_dim))
        layer.q_is_bfloat16 = q.dtype == torch.bfloat16
        self._attend(
            ctypes.addressof(layer),
            ctypes.addressof(batch),
            q.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            None if rows is None else rows.data_ptr(),
            num_rows,
        )
        return out


@lru_cache(maxsize=1)
def attention_kernel() -> AttentionKernel | None:
    """The kernel; None where the library is not there (library())."""
    loaded = library()
    return None if loaded is None else AttentionKernel(loaded)
