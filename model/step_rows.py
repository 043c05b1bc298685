"""The rows of a step as the layers see them: on the device, and fewer from layer to layer in a rebuild."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.inputs import ForwardInput, Kind
from forkpoint.model.rope import RotaryTable, Rotation
from forkpoint.model.trim import trim


class StepRows:
    """Rows that run in a layer. Mutable only in what it remembers of rotations.

    token_ids, positions: [T], output_rows: [S + N], write_slots: [T] by kind; all int64, on the device.
    output_rows is None where it is all rows in order.
    kept: which of the layer below's rows they are; None: all of them.
    """

    def __init__(
        self, inputs: ForwardInput, device: torch.device, kept: NDArray[np.int64] | None = None
    ) -> None:
        self.inputs = inputs
        self._device = device
        kinds = tuple(inputs.tables)
        arrays: list[NDArray[np.integer]] = [inputs.token_ids, inputs.positions, inputs.output_rows]
        arrays += [inputs.tables[kind].write_slots for kind in kinds]
        if kept is not None:
            arrays.append(kept)
        # One copy for all of them: a copy per array would cost a launch each.
        packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64)).to(device)
        token_ids, positions, output_rows, *others = torch.split(packed, [len(array) for array in arrays])
        self.token_ids = token_ids
        self.positions = positions
        is_all = np.array_equal(inputs.output_rows, np.arange(inputs.num_rows))
        self.output_rows = None if is_all else output_rows
        self.kept = None if kept is None else others.pop()
        self.write_slots: Mapping[Kind, torch.Tensor] = dict(zip(kinds, others, strict=True))
        self._rotations: dict[RotaryTable, Rotation] = {}

    @property
    def is_decode(self) -> bool:
        """Whether every row is the only one of its sequence (see Linear): never the rows of a rebuild."""
        return self.inputs.first_rows is None and self.inputs.num_rows == self.inputs.num_sequences

    def rotation(self, table: RotaryTable) -> Rotation:
        """cos and sin of these rows, looked up once for all layers."""
        found = self._rotations.get(table)
        if found is None:
            found = self._rotations[table] = table.rotation(self.positions)
        return found

    def above(self, layer: int) -> StepRows | None:
        """The rows that need `layer`'s output: these but in a rebuild; None if none do."""
        first_rows = self.inputs.first_rows
        trimmed = None if first_rows is None else trim(self.inputs, first_rows[layer + 1])
        if trimmed is None:
            return self
        inputs, kept = trimmed
        return StepRows(inputs, self._device, kept) if len(kept) else None
