"""Weights as int8 (`--quantization int8`): half the bytes of bfloat16, which is what a decode step waits for.

A weight is symmetric int8 with one bfloat16 scale for each output and group of 64 inputs, 8.25 bits a number.
Decode steps multiply whole numbers (native/int8.cpp), activations rounded to int8 as they come; all other
steps turn the weight back into floats, a layer at a time in one reused buffer, and compute as if these had
been stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch

from forkpoint.configs.errors import ConfigError
from forkpoint.model.config import Activation
from forkpoint.model.layer_maker import Embedding
from forkpoint.model.linear import GatedMlp, Linear, make_gated_mlp, make_linear
from forkpoint.model.native.int8 import GROUP, Int8Kernels, Int8Matrix

# Decode rows beyond this are multiplied as floats: turning the weight into them is shared by enough rows.
MAX_KERNEL_ROWS = 64
# Weights are quantised, and wide heads multiplied, this many numbers at a time.
PIECE_NUMBERS = 4 * 2**20

_LEVELS = 127

_log = structlog.stdlib.get_logger("forkpoint.engine")


def check_int8(device: torch.device) -> None:
    """Raise ConfigError where int8 weights cannot be served."""
    if device.type != "cpu":
        raise ConfigError(
            f"--quantization int8 is for the CPU; this server computes on {device.type}",
            hint="leave --quantization out, or use --device cpu",
        )


def quantize(weight: torch.Tensor) -> Int8Matrix:
    """[out, in] as int8. A scale is the largest of its group / 127; numbers are off by half a scale at most.

    Takes a few times PIECE_NUMBERS bytes beside the result. Does not modify or keep `weight`. A group with a
    number that is not finite gets NaN as its scale, so that what it touches is not finite either. This is
    the kernel's oracle.
    """
    num_out, num_in = weight.shape
    num_groups = -(-num_in // GROUP)
    values = torch.empty((num_out, num_groups * GROUP), dtype=torch.int8)
    scales = torch.empty((num_out, num_groups), dtype=torch.bfloat16)
    for start, end in _pieces(num_out, num_in):
        rows = torch.zeros((end - start, num_groups * GROUP))
        rows[:, :num_in] = weight[start:end]
        groups = rows.view(end - start, num_groups, GROUP)
        largest = groups.abs().amax(dim=-1)
        # Rounded up, or the largest number would not fit.
        scale = _rounded_up(largest / _LEVELS)
        scales[start:end] = scale
        divisor = torch.where(scale > 0, scale.float(), torch.inf)[..., None]
        whole = groups.div_(divisor).round_()
        # Infinity over infinity: whatever the group's scale is NaN for.
        values[start:end] = whole.nan_to_num_(0, 0, 0).view(end - start, -1)
    return Int8Matrix(values, scales, num_in)


def dequantize(matrix: Int8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats, [out, in]: every value times its scale, rounded once. In torch: the oracle."""
    groups = matrix.values.view(matrix.num_out, -1, GROUP).float() * matrix.scales.float()[..., None]
    return groups.view(matrix.num_out, -1)[:, : matrix.num_in].to(dtype)


def int8_bytes(num_out: int, num_in: int) -> int:
    """Memory of a quantised weight."""
    return num_out * -(-num_in // GROUP) * (GROUP + torch.bfloat16.itemsize)


class Int8Layers:
    """Makes layers that hold their weights as int8 and compute in `dtype`. Owns the buffer they share.

    kernels: int8_kernels(); without them (None) every step computes with floats.
    """

    def __init__(self, dtype: torch.dtype, kernels: Int8Kernels | None) -> None:
        self._kernels = kernels
        self._floats = FloatBuffer(dtype, self._kernels)
        if self._kernels is None:
            _log.warning(
                "int8_without_kernels",
                effect="int8 saves memory and costs speed: every step turns all weights into floats",
                hint="install with a C++ compiler at hand, or leave --quantization out",
            )

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Int8Linear."""
        return Int8Linear(self._kernels, self._floats, self._quantize(weight), bias)

    def gated_mlp(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> GatedMlp:
        """Int8GatedMlp."""
        matrices = self._quantize(gate_up), self._quantize(down)
        return Int8GatedMlp(self._kernels, self._floats, *matrices, gate_up_bias, down_bias, activation)

    def embedding(self, weight: torch.Tensor) -> Embedding:
        """Int8Embedding."""
        return Int8Embedding(self._kernels, self._floats, self._quantize(weight))

    def _quantize(self, weight: torch.Tensor) -> Int8Matrix:
        return quantize(weight) if self._kernels is None else self._kernels.quantize(weight)


class FloatBuffer:
    """Where weights are floats for the length of one product. Mutable.

    Grows to the largest that was asked for: an MLP, or PIECE_NUMBERS of a head.
    """

    def __init__(self, dtype: torch.dtype, kernels: Int8Kernels | None) -> None:
        self.dtype = dtype
        self._kernels = kernels
        self._numbers = torch.empty(0, dtype=dtype)

    def fill(self, *matrices: Int8Matrix) -> list[torch.Tensor]:
        """The weights as floats, [out, in] each; they hold until the next call."""
        sizes = [matrix.num_out * matrix.num_in for matrix in matrices]
        if sum(sizes) > len(self._numbers):
            self._numbers = torch.empty(sum(sizes), dtype=self.dtype)
        parts = self._numbers[: sum(sizes)].split(sizes)
        floats = [
            part.view(matrix.num_out, matrix.num_in) for part, matrix in zip(parts, matrices, strict=True)
        ]
        for into, matrix in zip(floats, matrices, strict=True):
            if self._kernels is not None:
                self._kernels.dequantize(matrix, into)
                continue
            for start, end in _pieces(matrix.num_out, matrix.num_in):
                into[start:end] = dequantize(_rows(matrix, start, end), self.dtype)
        return floats


class Int8Linear:
    """The int8 kernel for the rows of a decode step, a product of floats for all others."""

    def __init__(
        self,
        kernels: Int8Kernels | None,
        floats: FloatBuffer,
        weight: Int8Matrix,
        bias: torch.Tensor | None,
    ) -> None:
        self._kernels = kernels
        self._floats = floats
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        if self._kernels is not None and is_decode and len(x) <= MAX_KERNEL_ROWS:
            return self._kernels.linear(x, self._weight, self._bias)
        y = x.new_empty((len(x), self._weight.num_out))
        # A head has as many outputs as the vocabulary: never all of it as floats.
        for start, end in _pieces(self._weight.num_out, self._weight.num_in):
            (floats,) = self._floats.fill(_rows(self._weight, start, end))
            bias = None if self._bias is None else self._bias[start:end]
            part = make_linear(floats, bias)(x)
            if end - start == self._weight.num_out:
                return part
            y[:, start:end] = part
        return y


class Int8GatedMlp:
    """As Int8Linear for a whole gated MLP. gate_up: [2 * mlp_dim, hidden], down: [hidden, mlp_dim]."""

    def __init__(
        self,
        kernels: Int8Kernels | None,
        floats: FloatBuffer,
        gate_up: Int8Matrix,
        down: Int8Matrix,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> None:
        self._kernels = kernels
        self._floats = floats
        self._gate_up = gate_up
        self._down = down
        self._gate_up_bias = gate_up_bias
        self._down_bias = down_bias
        self._activation = activation

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        if self._kernels is not None and is_decode and len(x) <= MAX_KERNEL_ROWS:
            return self._kernels.gated_mlp(
                x, self._gate_up, self._gate_up_bias, self._down, self._down_bias, self._activation
            )
        gate_up, down = self._floats.fill(self._gate_up, self._down)
        return make_gated_mlp(gate_up, self._gate_up_bias, down, self._down_bias, self._activation)(x)


class Int8Embedding:
    """Turns the rows that are looked up into floats; a tied head shares the numbers."""

    def __init__(self, kernels: Int8Kernels | None, floats: FloatBuffer, table: Int8Matrix) -> None:
        self._kernels = kernels
        self._floats = floats
        self._table = table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self._table
        rows = Int8Matrix(
            table.values.index_select(0, token_ids), table.scales.index_select(0, token_ids), table.num_in
        )
        return dequantize(rows, self._floats.dtype)

    def tied_head(self) -> Linear:
        """The head on the same numbers."""
        return Int8Linear(self._kernels, self._floats, self._table, None)


def _rows(matrix: Int8Matrix, start: int, end: int) -> Int8Matrix:
    return Int8Matrix(matrix.values[start:end], matrix.scales[start:end], matrix.num_in)


def _pieces(num_out: int, num_in: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs with PIECE_NUMBERS numbers at most, or one output each; of 16s where that fits."""
    step = max(1, PIECE_NUMBERS // num_in)
    step = max(step // 16 * 16, 1)
    for start in range(0, num_out, step):
        yield start, min(start + step, num_out)


def _rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 that is not smaller, of numbers >= 0; NaN for what is not finite."""
    rounded = numbers.to(torch.bfloat16)
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    rounded = torch.where(rounded.float() < numbers, up, rounded)
    return torch.where(numbers.isfinite(), rounded, torch.nan)
