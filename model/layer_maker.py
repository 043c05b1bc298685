"""What makes layers of weights: the seam between a checkpoint's tensors and their form in memory."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from forkpoint.model.config import Activation
from forkpoint.model.linear import GatedMlp, Linear, make_gated_mlp, make_linear


class Embedding(Protocol):
    """Rows of the embedding for token_ids [T]: [T, hidden], unscaled, in the model's dtype."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def tied_head(self) -> Linear:
        """The lm_head of a model that ties it to the embedding."""
        ...


class LayerMaker(Protocol):
    """Makes layers. It may keep the tensors that it is given or turn them into something smaller."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """weight: [out, in], bias: [out]."""
        ...

    def gated_mlp(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> GatedMlp:
        """gate_up: [2 * mlp_dim, hidden], the gate's rows first. down: [hidden, mlp_dim]."""
        ...

    def embedding(self, weight: torch.Tensor) -> Embedding:
        """weight: [V, hidden]."""
        ...


class FloatLayers:
    """Layers of the weights as they were read."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """make_linear."""
        return make_linear(weight, bias)

    def gated_mlp(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> GatedMlp:
        """make_gated_mlp."""
        return make_gated_mlp(gate_up, gate_up_bias, down, down_bias, activation)

    def embedding(self, weight: torch.Tensor) -> Embedding:
        """The table itself."""
        return TableEmbedding(weight)


class TableEmbedding:
    """Looks rows up in the table [V, hidden], which it shares with a tied head where layers do not pack."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._table)

    def tied_head(self) -> Linear:
        """Where layers pack their weights this is a copy: rows cannot be looked up in packed weights.

        Decoding 8 rows is worth it.
        """
        return make_linear(self._table, None)
