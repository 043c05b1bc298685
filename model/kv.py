"""The memory that holds keys and values: per layer one tensor of pages for each, sized per kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from forkpoint.configs.errors import ConfigError
from forkpoint.model.config import ModelConfig
from forkpoint.model.inputs import Kind


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's pool. keys: [num_pages, P, Hkv, k_dim], values: [num_pages, P, Hkv, v_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class KvPools:
    """Keys and values of all layers, written in place; starts as zeros.

    Page 0 of each kind is scratch: rows that must not write are directed there, and nothing reads it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: Mapping[Kind, int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_pages: per kind of the model, page 0 included. Raises ConfigError if memory is too small."""
        for kind in config.kinds:
            if num_pages[kind] < 2:
                raise ConfigError(
                    f"the {kind} pool has {num_pages[kind]} pages; it needs 2 or more (page 0 is scratch)",
                    hint="give the pools more by --kv-cache-memory-bytes or --max-total-tokens",
                )
        self.page_size = page_size
        self.num_pages = {kind: num_pages[kind] for kind in config.kinds}
        self.dtype = dtype
        self.layers = tuple(
            LayerKv(
                _zeros((num_pages[spec.kind], page_size, spec.num_kv_heads, spec.k_dim), dtype, device),
                _zeros((num_pages[spec.kind], page_size, spec.num_kv_heads, spec.v_dim), dtype, device),
            )
            for spec in config.layers
        )
        # The same memory seen as slots: [num_pages * P, Hkv, D].
        self._slots = tuple(LayerKv(kv.keys.flatten(0, 1), kv.values.flatten(0, 1)) for kv in self.layers)

    def slots(self, layer: int) -> LayerKv:
        """The pool of a layer as slots [num_pages * P, Hkv, D]; a view, slot = page * P + offset."""
        return self._slots[layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [T, Hkv, k_dim] and values [T, Hkv, v_dim] at slots [T] int64, in the pool's dtype."""
        pool = self._slots[layer]
        pool.keys.index_copy_(0, slots, keys.to(self.dtype))
        pool.values.index_copy_(0, slots, values.to(self.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        if device.type == "cpu":
            # torch.zeros writes to every byte; numpy leaves that to the first use of each page of memory.
            flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(flat).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as exc:  # torch reports a failed allocation as RuntimeError
        raise ConfigError(
            f"no memory for a KV pool of {shape[0]} pages of {shape[1]} tokens: {exc}",
            hint="lower --kv-cache-memory-bytes, --max-total-tokens or --context-length",
        ) from exc
