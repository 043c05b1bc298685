"""What an attention backend is: planned once per step, asked once per layer. It does not write KV."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.config import ModelConfig
from forkpoint.model.inputs import ForwardInput, Kind


class AttentionBackend(Protocol):
    """Attention over the paged pools for one ragged batch of prefill chunks and decode rows."""

    @property
    def name(self) -> str:
        """As --attention-backend names it."""
        ...

    @property
    def tile_rows(self) -> int:
        """Rows of one attention tile; tiles begin at multiples of it in absolute position. 1: no tiles."""
        ...

    def plan(self, inputs: ForwardInput, kinds: Collection[Kind]) -> None:
        """Prepare for attend() on these rows; what is computed here is shared by all layers.

        Once per step, or in a rebuild whenever the rows change. kinds: of the layers that follow.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q to this layer's keys and values, read as the pool stores them, this step's rows too.

        q: [T, Hq, k_dim], rotated, in batch order. Returns [T, Hq, v_dim], same dtype.
        SWA layers see positions (p - W, p]. plan() must have run, and the layer's KV must be written.
        sinks: [Hq] float32, a logit that joins each row's softmax without a value, neither scaled nor capped.
        rows: [N] int64, each at most once, in any order: q holds these rows of the step alone, [N, Hq, D].
        """
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: rows [row_start, row_end) at positions [start, end)."""

    row_start: int
    row_end: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.row_end - self.row_start


def spans(inputs: ForwardInput) -> list[Span]:
    """The spans of a step, one per sequence."""
    result = []
    for row_start, row_end in zip(inputs.q_indptr[:-1].tolist(), inputs.q_indptr[1:].tolist(), strict=True):
        assert row_end > row_start, "a sequence without rows is in the batch"
        result.append(Span(row_start, row_end, int(inputs.positions[row_start])))
    return result


def first_key(span: Span, window: int | None, lowest_key: int) -> int:
    """Lowest position that the first row of the span can see, and that holds something of its sequence."""
    return lowest_key if window is None else max(lowest_key, span.start - window + 1)


def slots_between(
    inputs: ForwardInput, kind: Kind, sequence: int, start: int, end: int, page_size: int
) -> NDArray[np.int64]:
    """Slots of the positions [start, end) of a sequence, as its page table says."""
    table = inputs.tables[kind]
    pages = table.kv_pages[table.kv_indptr[sequence] : table.kv_indptr[sequence + 1]]
    first = int(table.first_position[sequence])
    listed_end = first + (len(pages) - 1) * page_size + int(table.last_page_len[sequence])
    assert first <= start and end <= listed_end, (
        f"{kind} table of sequence {sequence} lists [{first}, {listed_end}), [{start}, {end}) is needed"
    )
    offsets = np.arange(start - first, end - first, dtype=np.int64)
    return pages[offsets // page_size].astype(np.int64) * page_size + offsets % page_size


def windows_of(config: ModelConfig, kinds: Collection[Kind]) -> list[int | None]:
    """The windows of the layers of `kinds`, each once: what a plan is made for."""
    return list(dict.fromkeys(layer.window for layer in config.layers if layer.kind in kinds))


def kind_of(window: int | None) -> Kind:
    """The kind whose table a layer with this window reads."""
    return "full" if window is None else "swa"
