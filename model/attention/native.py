"""Attention on CPUs by the native kernel, which reads the pools by the step's own page tables."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from forkpoint.model.attention.base import windows_of
from forkpoint.model.attention.tiles import TILE_ROWS
from forkpoint.model.config import ModelConfig
from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.kv import KvPools
from forkpoint.model.native.attention import AttentionKernel, Batch, Layer


class NativeBackend:
    """One call of the kernel for each layer; planning only checks the tables and remembers them."""

    name = "cpu"
    # The kernel's bits do not depend on where a chunk begins. Steps are still cut on this grid, since a chunk
    # with a single row, or with rows that oneDNN multiplies one way or another, may come out differently.
    tile_rows = TILE_ROWS

    def __init__(self, config: ModelConfig, pools: KvPools, kernel: AttentionKernel) -> None:
        self._config = config
        self._pools = pools
        self._kernel = kernel
        self._layers = [Layer.of(spec, pools.slots(index)) for index, spec in enumerate(config.layers)]
        self._kinds = [spec.kind for spec in config.layers]
        self._batches: dict[Kind, Batch] = {}

    def plan(self, inputs: ForwardInput, kinds: Collection[Kind]) -> None:
        assert (np.diff(inputs.q_indptr) > 0).all(), "a sequence without rows is in the batch"
        for kind in kinds:
            self._check(inputs, kind)
            self._batches[kind] = Batch.of(inputs, inputs.tables[kind], self._pools.page_size)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernel.attend(self._layers[layer], self._batches[self._kinds[layer]], q, sinks, rows)

    def _check(self, inputs: ForwardInput, kind: Kind) -> None:
        """The kernel reads what the tables say, wherever that is: they must list all that it needs."""
        table, page_size = inputs.tables[kind], self._pools.page_size
        starts = inputs.positions[inputs.q_indptr[:-1]]
        ends = inputs.positions[inputs.q_indptr[1:] - 1] + 1
        windows = [window for window in windows_of(self._config, (kind,)) if window is not None]
        lowest = np.maximum(table.lowest_key, starts - max(windows) + 1) if windows else table.lowest_key
        num_pages = np.diff(table.kv_indptr)
        listed_ends = table.first_position + (num_pages - 1) * page_size + table.last_page_len
        is_wrong = (table.first_position > lowest) | (listed_ends < ends)
        assert not is_wrong.any(), (
            f"{kind} table of sequence {(at := int(is_wrong.argmax()))} lists "
            f"[{table.first_position[at]}, {listed_ends[at]}), [{lowest[at]}, {ends[at]}) is needed"
        )
        assert table.kv_pages.max(initial=0) < self._pools.num_pages[kind], f"{kind} table has unknown pages"
