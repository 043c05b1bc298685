"""The decoder: one forward pass of any configured model over one ragged batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.attention.base import AttentionBackend
from forkpoint.model.config import LayerSpec, RopeSpec
from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.kv import KvPools
from forkpoint.model.load import Model
from forkpoint.model.rope import Rotation, inverse_frequencies, rotate, rotation
from forkpoint.model.trim import trim
from forkpoint.model.weights import LayerWeights


class Decoder:
    """Runs a loaded model on its pools. Layers differ by their LayerSpec only."""

    def __init__(self, model: Model, pools: KvPools, backend: AttentionBackend) -> None:
        self._model = model
        self._config = model.config
        self._pools = pools
        self._backend = backend
        self._frequencies = {
            layer.rope: inverse_frequencies(layer.rope, model.config.context_length).to(model.device)
            for layer in model.config.layers
            if layer.rope is not None
        }
        # Rounded to the weights' dtype as transformers does: sqrt(640) = 25.298 is 25.25 in bfloat16.
        self._embedding_multiplier = torch.tensor(
            model.config.embedding_multiplier, dtype=model.dtype, device=model.device
        )

    def run(self, inputs: ForwardInput) -> torch.Tensor:
        """Run the batch and write its KV. Returns the last layer's output for inputs.output_rows.

        [S + N, hidden], in the order of output_rows; head() makes logits of it.
        """
        rows = self._all_rows(inputs)
        x = self._model.weights.embedding(rows.batch.token_ids)
        if self._config.embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        planned: tuple[Kind, ...] = ()
        for index, spec in enumerate(self._config.layers):
            above = self._rows_above(rows, index)
            if above is None:
                # Only KV was wanted of this layer, and none of the layers above: an early chunk of a rebuild.
                self._write_kv(x, index, rows)
                return x[:0]
            if above is not rows:
                planned = ()
            if spec.kind not in planned:
                # Rows change at nearly every layer of a rebuild: plan only what the next layers need.
                kinds = self._config.kinds if inputs.first_rows is None else (spec.kind,)
                self._backend.plan(above.inputs, kinds)
                planned += kinds
            x = self._layer(x, index, rows, above)
            rows = above
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] float32 of rows [N, hidden] that run() returned."""
        if not len(x):
            return torch.empty((0, self._config.vocab_size), device=self._model.device)
        logits = self._model.weights.lm_head(self._model.weights.final_norm(x), is_decode=True).float()
        if self._config.logit_multiplier != 1.0:
            logits = logits * self._config.logit_multiplier
        if self._config.final_softcap is not None:
            logits = self._config.final_softcap * torch.tanh(logits / self._config.final_softcap)
        return logits

    def _all_rows(self, inputs: ForwardInput) -> _Rows:
        batch = _copy_to_device(inputs, self._model.device)
        rotations = {
            rope: rotation(rope, frequencies, batch.positions, self._model.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        return _Rows(inputs, batch, rotations, None)

    def _rows_above(self, rows: _Rows, index: int) -> _Rows | None:
        """The rows that need layer `index`'s output: `rows` itself but in a rebuild; None if none do."""
        first_rows = rows.inputs.first_rows
        trimmed = None if first_rows is None else trim(rows.inputs, first_rows[index + 1])
        if trimmed is None:
            return rows
        inputs, kept_rows = trimmed
        if not len(kept_rows):
            return None
        batch = _copy_to_device(inputs, self._model.device)
        kept = torch.from_numpy(kept_rows).to(self._model.device)
        rotations = {rope: full.select(kept) for rope, full in rows.rotations.items()}
        return _Rows(inputs, batch, rotations, kept)

    def _write_kv(self, x: torch.Tensor, index: int, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute and store keys and values of all `rows`; returns their q, and x as attention took it."""
        spec = self._config.layers[index]
        weights = self._model.weights.layers[index]
        normed = x if weights.attention_norm is None else weights.attention_norm(x)
        q, keys, values = _project(normed, spec, weights, rows)
        self._pools.write(index, rows.batch.write_slots[spec.kind], keys, values)
        return q, normed

    def _layer(self, x: torch.Tensor, index: int, rows: _Rows, above: _Rows) -> torch.Tensor:
        """x: [T, hidden] of `rows`. Returns the layer's output for the rows `above`."""
        weights = self._model.weights.layers[index]
        is_parallel = self._config.layers[index].block == "parallel"
        q, normed = self._write_kv(x, index, rows)
        if above is not rows:
            assert above.kept is not None
            q, x = q.index_select(0, above.kept), x.index_select(0, above.kept)
            normed = normed.index_select(0, above.kept) if is_parallel else normed
        if index == self._config.num_layers - 1:
            # Above the last KV only the output rows matter; a chunk that wants none ends here.
            wanted = above.batch.output_rows
            x = x.index_select(0, wanted)
            if not len(x):
                return x
            normed = normed.index_select(0, wanted) if is_parallel else normed
            attended = self._backend.attend(q, index, weights.sinks).index_select(0, wanted)
        else:
            attended = self._backend.attend(q, index, weights.sinks)
        branch = weights.o(attended.flatten(1), is_decode=rows.is_decode)
        if is_parallel:
            return x + self._added(branch) + self._added(weights.mlp(normed, is_decode=rows.is_decode))
        if weights.attention_output_norm is not None:
            branch = weights.attention_output_norm(branch)
        x = x + self._added(branch)
        normed = x if weights.mlp_norm is None else weights.mlp_norm(x)
        branch = weights.mlp(normed, is_decode=rows.is_decode)
        if weights.mlp_output_norm is not None:
            branch = weights.mlp_output_norm(branch)
        return x + self._added(branch)

    def _added(self, branch: torch.Tensor) -> torch.Tensor:
        """What a branch adds to the residual stream."""
        multiplier = self._config.residual_multiplier
        return branch if multiplier == 1.0 else branch * multiplier


@dataclass(frozen=True, slots=True)
class _Batch:
    """A step on the device, all int64. token_ids, positions, write_slots: [T], output_rows: [S + N]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    output_rows: torch.Tensor
    write_slots: Mapping[Kind, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that run in a layer. kept: which of the layer below's rows they are; None: all of them."""

    inputs: ForwardInput
    batch: _Batch
    rotations: Mapping[RopeSpec, Rotation]
    kept: torch.Tensor | None

    @property
    def is_decode(self) -> bool:
        """Whether every row is the only one of its sequence (see Linear): never the rows of a rebuild."""
        return self.inputs.first_rows is None and self.inputs.num_rows == self.inputs.num_sequences


def _copy_to_device(inputs: ForwardInput, device: torch.device) -> _Batch:
    kinds = tuple(inputs.tables)
    arrays: list[NDArray[np.integer]] = [inputs.token_ids, inputs.positions, inputs.output_rows]
    arrays += [inputs.tables[kind].write_slots for kind in kinds]
    # One copy for all of them: a copy per array would cost a launch each.
    packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64)).to(device)
    token_ids, positions, output_rows, *write_slots = torch.split(packed, [len(array) for array in arrays])
    return _Batch(token_ids, positions, output_rows, dict(zip(kinds, write_slots, strict=True)))


def _project(
    normed: torch.Tensor, spec: LayerSpec, weights: LayerWeights, rows: _Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, Hq, k_dim], keys [T, Hkv, k_dim] (both normed and rotated), values [T, Hkv, v_dim]."""
    qkv = weights.qkv(normed, is_decode=rows.is_decode)
    qk_dim = (spec.num_q_heads + spec.num_kv_heads) * spec.k_dim
    # q and k side by side: one norm and one rotation for both.
    qk = qkv[:, :qk_dim].view(len(normed), -1, spec.k_dim)
    if weights.qk_norm is not None:
        qk = weights.qk_norm(qk)
    if spec.rope is not None:
        qk = rotate(qk, rows.rotations[spec.rope])
    values = qkv[:, qk_dim:].view(len(normed), -1, spec.v_dim)
    if spec.value_scale != 1.0:
        values = values * spec.value_scale
    return qk[:, : spec.num_q_heads], qk[:, spec.num_q_heads :], values
