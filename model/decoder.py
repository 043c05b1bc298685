"""The decoder: one forward pass of any configured model over one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forkpoint.model.attention.base import AttentionBackend
from forkpoint.model.config import LayerSpec
from forkpoint.model.heads import HeadPlacer, HeadPlacerMaker
from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.joint import Joint, JointMaker
from forkpoint.model.kv import KvPools
from forkpoint.model.load import Model
from forkpoint.model.native.rows import RowKernels, row_kernels
from forkpoint.model.rope import RotaryTable
from forkpoint.model.step_rows import StepRows
from forkpoint.model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer. after_attention, after_mlp: they add a branch and make the input of the next one."""

    spec: LayerSpec
    weights: LayerWeights
    placer: HeadPlacer
    after_attention: Joint
    after_mlp: Joint

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP take the same input."""
        return self.spec.block == "parallel"

    def after(
        self, attended: torch.Tensor, x: torch.Tensor, normed: torch.Tensor, *, is_decode: bool
    ) -> torch.Tensor:
        """Add attention's branch and the MLP's to x in place. Returns what the next layer takes.

        attended: [T, Hq, v_dim]. normed: what attention was given.
        """
        joined = self.after_attention(x, self.weights.o(attended.flatten(1), is_decode=is_decode))
        branch = self.weights.mlp(normed if self.is_parallel else joined, is_decode=is_decode)
        return self.after_mlp(x, branch)


class Decoder:
    """Runs a loaded model on its pools. Layers differ by their LayerSpec only."""

    def __init__(
        self, model: Model, pools: KvPools, backend: AttentionBackend, *, is_native: bool = True
    ) -> None:
        """is_native: use row kernels where they are; without, all is torch's: the oracle of tests."""
        self._model = model
        self._config = model.config
        self._backend = backend
        kernels = row_kernels(model.dtype, pools.dtype, model.device) if is_native else None
        self._tables = {
            spec.rope: RotaryTable(spec.rope, self._config.context_length, model.dtype, model.device)
            for spec in self._config.layers
            if spec.rope is not None
        }
        self._before, self._layers = self._make_layers(pools, kernels)
        # Rounded to the weights' dtype as transformers does: sqrt(640) = 25.298 is 25.25 in bfloat16.
        self._embedding_multiplier = torch.tensor(
            self._config.embedding_multiplier, dtype=model.dtype, device=model.device
        )

    def run(self, inputs: ForwardInput) -> torch.Tensor:
        """Run the batch and write its KV. Returns the last layer's output for inputs.output_rows, normed.

        [S + N, hidden], in the order of output_rows; head() makes logits of it. Valid until the next run().
        """
        for table in self._tables.values():
            table.reach(int(inputs.positions.max()) + 1)
        rows = StepRows(inputs, self._model.device)
        x = self._model.weights.embedding(rows.token_ids)
        if self._config.embedding_multiplier != 1.0:
            x *= self._embedding_multiplier
        normed = self._before(x, None)
        planned: tuple[Kind, ...] = ()
        for index, layer in enumerate(self._layers):
            above = rows.above(index)
            q = layer.placer(layer.weights.qkv(normed, is_decode=rows.is_decode), rows)
            if above is None:
                # Only KV was wanted of this layer, and none of the layers above: an early chunk of a rebuild.
                return x[:0]
            if above is not rows:
                planned = ()
            if layer.spec.kind not in planned:
                # Rows change at nearly every layer of a rebuild: plan only what the next layers need.
                kinds = self._config.kinds if inputs.first_rows is None else (layer.spec.kind,)
                self._backend.plan(above.inputs, kinds)
                planned += kinds
            # Above the last KV only the output rows matter; a chunk that wants none ends here.
            wanted = above.output_rows if index == len(self._layers) - 1 else None
            for chosen in (above.kept if above is not rows else None, wanted):
                if chosen is not None:
                    q, x = q.index_select(0, chosen), x.index_select(0, chosen)
                    normed = normed.index_select(0, chosen) if layer.is_parallel else normed
            if not len(x):
                return x
            attended = self._backend.attend(q, index, layer.weights.sinks, wanted)
            normed = layer.after(attended, x, normed, is_decode=rows.is_decode)
            rows = above
        return normed

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] float32 of rows [N, hidden] that run() returned."""
        if not len(x):
            return torch.empty((0, self._config.vocab_size), device=self._model.device)
        logits = self._model.weights.lm_head(x, is_decode=True).float()
        if self._config.logit_multiplier != 1.0:
            logits *= self._config.logit_multiplier
        if self._config.final_softcap is not None:
            logits = logits.div_(self._config.final_softcap).tanh_().mul_(self._config.final_softcap)
        return logits

    def _make_layers(self, pools: KvPools, kernels: RowKernels | None) -> tuple[Joint, tuple[_Layer, ...]]:
        """What comes before the first layer, and the layers."""
        config, weights = self._config, self._model.weights
        joints = JointMaker(config.hidden_size, config.residual_multiplier, self._model.dtype, kernels)
        placers = HeadPlacerMaker(pools, self._model.dtype, kernels)
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        layers = [
            _Layer(
                spec,
                own,
                placers.placer(index, spec, own.qk_norm, self._tables[spec.rope] if spec.rope else None),
                joints.joint(own.attention_output_norm, own.mlp_norm),
                joints.joint(own.mlp_output_norm, next_norm),
            )
            for index, (spec, own, next_norm) in enumerate(
                zip(config.layers, weights.layers, next_norms, strict=True)
            )
        ]
        return joints.joint(None, weights.layers[0].attention_norm), tuple(layers)
