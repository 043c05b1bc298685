"""Attention on CPUs in torch operations: tiles of rows for prefill, padded batches for decode, folded heads.

The query heads that share a KV head become rows of one matrix product, so a key is read once for all of them.

Prefill, one span of W = 4 cut at multiples of the tile (here 4 rows):

    positions      0 1 2 3 | 4 5 6 7 | 8 9
    rows                 3 | 4 5 6 7 | 8 9      three tiles; a tile's bounds depend on positions only
    keys of tile 2   1 2 3   4 5 6 7            from its first row's window to its last row: all live
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from forkpoint.model.attention.base import Span, first_key, kind_of, slots_between, spans, windows_of
from forkpoint.model.config import LayerSpec, ModelConfig
from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.kv import KvPools

# 64 to 128 rows are fastest at head_dim 256 with 4 heads per KV head; fewer rows compute fewer hidden scores.
TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [row_start, row_end) of the batch see keys [key_start, key_end) of the span's gathered ones.

    bias: [rows, 1, n] float32, 0 or -inf, added to the last n keys; the keys before are seen by all rows.
    """

    row_start: int
    row_end: int
    key_start: int
    key_end: int
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    slots: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _Decode:
    """B one-row sequences of similar length, padded to n keys.

    rows: [B] int64, or None when they are all rows of the batch in order. slots: [B * n] int64.
    bias: [B, 1, 1, n], 0 or -inf at the padding; None without padding.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    num_sequences: int
    bias: torch.Tensor | None


class TilesBackend:
    """Attention in torch operations, gathered into buffers that live across steps."""

    name = "cpu"

    def __init__(self, config: ModelConfig, pools: KvPools, tile_rows: int = TILE_ROWS) -> None:
        self._config = config
        self._pools = pools
        self._tile_rows = tile_rows
        self._keys = _GatherBuffer(pools.dtype)
        self._values = _GatherBuffer(pools.dtype)
        # By window, None for full attention.
        self._prefills: dict[int | None, list[_Prefill]] = {}
        self._decodes: dict[int | None, list[_Decode]] = {}
        self._num_rows = 0

    @property
    def tile_rows(self) -> int:
        return self._tile_rows

    def plan(self, inputs: ForwardInput, kinds: Collection[Kind]) -> None:
        self._num_rows = inputs.num_rows
        all_spans = list(enumerate(spans(inputs)))
        decodes = [(index, span) for index, span in all_spans if span.end - span.start == 1]
        prefills = [(index, span) for index, span in all_spans if span.end - span.start > 1]
        for window in windows_of(self._config, kinds):
            self._prefills[window] = [self._plan_prefill(inputs, window, *item) for item in prefills]
            self._decodes[window] = self._plan_decodes(inputs, window, decodes)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if rows is not None:
            # A product of fewer rows could have other bits: all of them run.
            whole = q.new_zeros((self._num_rows, *q.shape[1:])).index_copy_(0, rows, q)
            return self.attend(whole, layer, sinks).index_select(0, rows)
        spec = self._config.layers[layer]
        # Scaling q instead of the scores saves a pass over them; in bfloat16 it also rounds less.
        q = q * spec.attention_scale
        out = torch.empty((q.shape[0], spec.num_q_heads, spec.v_dim), dtype=q.dtype)
        if sinks is not None:
            # [Hkv, group]: heads are folded.
            sinks = sinks.view(spec.num_kv_heads, -1)
        for prefill in self._prefills[spec.window]:
            self._attend_prefill(q, out, layer, prefill, sinks)
        for decode in self._decodes[spec.window]:
            self._attend_decode(q, out, layer, decode, sinks)
        return out

    # ---- prefill

    def _plan_prefill(self, inputs: ForwardInput, window: int | None, sequence: int, span: Span) -> _Prefill:
        kind = kind_of(window)
        lowest = first_key(span, window, int(inputs.tables[kind].lowest_key[sequence]))
        slots = slots_between(inputs, kind, sequence, lowest, span.end, self._pools.page_size)
        tiles = []
        start = span.start
        while start < span.end:
            end = min((start // self._tile_rows + 1) * self._tile_rows, span.end)
            key_start = lowest if window is None else max(lowest, start - window + 1)
            tiles.append(
                _Tile(
                    row_start=span.row_start + start - span.start,
                    row_end=span.row_start + end - span.start,
                    key_start=key_start - lowest,
                    key_end=end - lowest,
                    bias=_tile_bias(start, end, key_start, window),
                )
            )
            start = end
        return _Prefill(torch.from_numpy(slots), tuple(tiles))

    def _attend_prefill(
        self, q: torch.Tensor, out: torch.Tensor, layer: int, prefill: _Prefill, sinks: torch.Tensor | None
    ) -> None:
        spec = self._config.layers[layer]
        pool = self._pools.slots(layer)
        # [Hkv, n, D] views of [n, Hkv, D]
        keys = self._keys.gather(pool.keys, prefill.slots).to(q.dtype).transpose(0, 1)
        values = self._values.gather(pool.values, prefill.slots).to(q.dtype).transpose(0, 1)
        group = spec.num_q_heads // spec.num_kv_heads
        for tile in prefill.tiles:
            rows = tile.row_end - tile.row_start
            q_tile = q[tile.row_start : tile.row_end].view(rows, spec.num_kv_heads, group, spec.k_dim)
            folded = q_tile.transpose(0, 1).reshape(spec.num_kv_heads, rows * group, spec.k_dim)
            scores = torch.bmm(folded, keys[:, tile.key_start : tile.key_end].transpose(1, 2))
            scores = _softcap(scores, spec)
            by_row = scores.view(spec.num_kv_heads, rows, group, -1)
            by_row[..., by_row.shape[-1] - tile.bias.shape[-1] :] += tile.bias.to(q.dtype)
            if sinks is not None:
                columns = sinks.to(q.dtype)[:, None].expand(-1, rows, -1).reshape(len(sinks), -1, 1)
                scores = torch.cat([scores, columns], dim=-1)
            tile_values = values[:, tile.key_start : tile.key_end]
            # A sink takes its share of the softmax and brings no value.
            attended = torch.bmm(torch.softmax(scores, dim=-1)[..., : tile_values.shape[1]], tile_values)
            out_tile = out[tile.row_start : tile.row_end].view(rows, spec.num_kv_heads, group, spec.v_dim)
            out_tile.copy_(attended.view(spec.num_kv_heads, rows, group, spec.v_dim).transpose(0, 1))

    # ---- decode

    def _plan_decodes(
        self, inputs: ForwardInput, window: int | None, decodes: list[tuple[int, Span]]
    ) -> list[_Decode]:
        kind = kind_of(window)
        # Bound the padding: only lengths between the same two powers of two share a batch.
        buckets: defaultdict[int, list[tuple[int, NDArray[np.int64]]]] = defaultdict(list)
        for sequence, span in decodes:
            lowest = first_key(span, window, int(inputs.tables[kind].lowest_key[sequence]))
            slots = slots_between(inputs, kind, sequence, lowest, span.end, self._pools.page_size)
            buckets[(len(slots) - 1).bit_length()].append((span.row_start, slots))
        return [_pad(bucket, inputs.num_rows) for bucket in buckets.values()]

    def _attend_decode(
        self, q: torch.Tensor, out: torch.Tensor, layer: int, decode: _Decode, sinks: torch.Tensor | None
    ) -> None:
        spec = self._config.layers[layer]
        pool = self._pools.slots(layer)
        shape = (decode.num_sequences, -1, spec.num_kv_heads)
        keys = self._keys.gather(pool.keys, decode.slots).to(q.dtype).view(*shape, spec.k_dim)
        values = self._values.gather(pool.values, decode.slots).to(q.dtype).view(*shape, spec.v_dim)
        rows = q if decode.rows is None else q.index_select(0, decode.rows)
        group = spec.num_q_heads // spec.num_kv_heads
        folded = rows.view(decode.num_sequences, spec.num_kv_heads, group, spec.k_dim)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        attended = _attend_padded(folded, keys, values, decode.bias, spec, sinks)
        attended = attended.reshape(decode.num_sequences, spec.num_q_heads, spec.v_dim)
        if decode.rows is None:
            out.copy_(attended)
        else:
            out.index_copy_(0, decode.rows, attended)


class _GatherBuffer:
    """One growing buffer for gathered rows: a fresh allocation of megabytes per layer costs page faults."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype)

    def gather(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """pool[slots] for pool [S, Hkv, D]; overwritten by the next call."""
        shape = (len(slots), *pool.shape[1:])
        size = len(slots) * pool.shape[1] * pool.shape[2]
        if size > len(self._flat):
            self._flat = torch.empty(max(size, 2 * len(self._flat)), dtype=pool.dtype)
        return torch.index_select(pool, 0, slots, out=self._flat[:size].view(shape))


def _tile_bias(start: int, end: int, key_start: int, window: int | None) -> torch.Tensor:
    # Without a window, keys before the tile are seen by all its rows and need no bias.
    first = start if window is None else key_start
    q_positions = torch.arange(start, end)[:, None]
    k_positions = torch.arange(first, end)[None, :]
    hidden = k_positions > q_positions
    if window is not None:
        hidden |= k_positions <= q_positions - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]


def _pad(bucket: list[tuple[int, NDArray[np.int64]]], num_rows: int) -> _Decode:
    longest = max(len(slots) for _, slots in bucket)
    padded = np.empty((len(bucket), longest), dtype=np.int64)
    lengths = np.empty((len(bucket), 1), dtype=np.int64)
    for index, (_, slots) in enumerate(bucket):
        padded[index, : len(slots)] = slots
        # Padding repeats a slot that holds a number: a stale slot could hold NaN, and 0 * NaN is NaN.
        padded[index, len(slots) :] = slots[-1]
        lengths[index] = len(slots)
    bias = None
    if lengths.min() < longest:
        hidden = torch.from_numpy(np.arange(longest) >= lengths)
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
    rows = [row for row, _ in bucket]
    return _Decode(
        rows=None if rows == list(range(num_rows)) else torch.tensor(rows),
        slots=torch.from_numpy(padded.reshape(-1)),
        num_sequences=len(bucket),
        bias=bias,
    )


def _attend_padded(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q: [B, Hkv, group, k_dim], scaled. keys, values: [B, Hkv, n, D]. sinks: [Hkv, group].

    Returns [B, Hkv, group, v_dim].
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    # Several times faster than matmul with several KV heads: 8 x 1,024 keys, 8 heads of 128, one thread,
    # float32: 12 ms against 93, for matmul handles strided batches of 4 rows badly (2026-11).
    if spec.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=1.0)
    if spec.softcap is None and spec.k_dim == spec.v_dim:
        attended: torch.Tensor
        attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, attn_mask=bias, scale=1.0
        )
        # The share of the softmax that a sink leaves: sum / (sum + exp(sink)).
        return attended.mul_(torch.sigmoid(log_sum - sinks)[..., None])
    scores = _softcap(torch.matmul(q, keys.transpose(2, 3)), spec)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        columns = sinks.to(q.dtype)[..., None].expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, columns], dim=-1)
    return torch.matmul(torch.softmax(scores, dim=-1)[..., : values.shape[2]], values)


def _softcap(scores: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    if spec.softcap is None:
        return scores
    return torch.tanh(scores / spec.softcap) * spec.softcap
