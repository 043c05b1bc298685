"""The reference attention backend: sequence by sequence, in float32, plain enough to trust; any device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from forkpoint.model.attention.base import Span, first_key, kind_of, slots_between, spans, windows_of
from forkpoint.model.config import LayerSpec, ModelConfig
from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.kv import KvPools


@dataclass(frozen=True, slots=True)
class _Sequence:
    """slots: where keys [num_keys] lie. visible: [rows, num_keys] bool, key j is seen by row i."""

    span: Span
    slots: torch.Tensor
    visible: torch.Tensor


class TorchReferenceBackend:
    """Scores of all rows and keys of a sequence at once, masked by position; the oracle of other backends."""

    name = "torch"
    tile_rows = 1

    def __init__(self, config: ModelConfig, pools: KvPools, device: torch.device) -> None:
        self._config = config
        self._pools = pools
        self._device = device
        # By window, None for full attention.
        self._planned: dict[int | None, list[_Sequence]] = {}
        self._num_rows = 0

    def plan(self, inputs: ForwardInput, kinds: Collection[Kind]) -> None:
        self._num_rows = inputs.num_rows
        for window in windows_of(self._config, kinds):
            self._planned[window] = [
                self._plan_sequence(inputs, window, index, span) for index, span in enumerate(spans(inputs))
            ]

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if rows is not None:
            whole = q.new_zeros((self._num_rows, *q.shape[1:])).index_copy_(0, rows, q)
            return self.attend(whole, layer, sinks).index_select(0, rows)
        spec = self._config.layers[layer]
        pool = self._pools.slots(layer)
        out = torch.empty((q.shape[0], spec.num_q_heads, spec.v_dim), dtype=q.dtype, device=q.device)
        for sequence in self._planned[spec.window]:
            own = slice(sequence.span.row_start, sequence.span.row_end)
            keys = pool.keys[sequence.slots].float()
            values = pool.values[sequence.slots].float()
            attended = _attend_sequence(q[own].float(), keys, values, sequence.visible, spec, sinks)
            out[own] = attended.to(q.dtype)
        return out

    def _plan_sequence(self, inputs: ForwardInput, window: int | None, index: int, span: Span) -> _Sequence:
        kind = kind_of(window)
        # Keys that no row sees are left out, not masked: their slots may hold anything, and 0 * NaN is NaN.
        lowest = first_key(span, window, int(inputs.tables[kind].lowest_key[index]))
        slots = slots_between(inputs, kind, index, lowest, span.end, self._pools.page_size)
        q_positions = torch.arange(span.start, span.end)[:, None]
        k_positions = torch.arange(lowest, span.end)[None, :]
        visible = k_positions <= q_positions
        if window is not None:
            visible &= k_positions > q_positions - window
        return _Sequence(span, torch.from_numpy(slots).to(self._device), visible.to(self._device))


def _attend_sequence(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q: [rows, Hq, k_dim], keys, values: [num_keys, Hkv, D]. Returns [rows, Hq, v_dim]."""
    group = spec.num_q_heads // spec.num_kv_heads
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * spec.attention_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        # A key of its own that has no value: in the softmax, not in the sum.
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)
