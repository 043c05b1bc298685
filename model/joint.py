"""What lies between two branches of the decoder: one is added to the stream, the next gets its input."""

from __future__ import annotations

from typing import Protocol

import torch

from forkpoint.model.native.rows import GrowingBuffer, JoinCall, RowKernels
from forkpoint.model.norm import NormLayer, norm_parameters


class Joint(Protocol):
    """Adds a branch to x and norms the sum."""

    def __call__(self, x: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        """Add the branch [T, hidden] to x [T, hidden] in place; None adds nothing.

        Returns what the next branch takes: x's norm, valid until a joint is called again, or x itself.
        """
        ...


class JointMaker:
    """Makes the joints of one model: by kernels where they are, else of torch operations."""

    def __init__(
        self, hidden_size: int, residual_multiplier: float, dtype: torch.dtype, kernels: RowKernels | None
    ) -> None:
        self._hidden_size = hidden_size
        self._multiplier = residual_multiplier
        self._dtype = dtype
        self._kernels = kernels
        # One for all joints: what one gives is used up when the next is called.
        self._buffer = GrowingBuffer(dtype)

    def joint(self, branch_norm: NormLayer | None, next_norm: NormLayer | None) -> Joint:
        """branch_norm: of the branch before it is added. next_norm: of the sum, for the next branch."""
        if self._kernels is None:
            return TorchJoint(branch_norm, next_norm, self._multiplier)
        call = self._kernels.join_call(
            self._dtype,
            self._hidden_size,
            self._multiplier,
            None if branch_norm is None else norm_parameters(branch_norm),
            None if next_norm is None else norm_parameters(next_norm),
        )
        return NativeJoint(call, self._buffer, has_norm=next_norm is not None)


class TorchJoint:
    """One operation after the other."""

    def __init__(self, branch_norm: NormLayer | None, next_norm: NormLayer | None, multiplier: float) -> None:
        self._branch_norm = branch_norm
        self._next_norm = next_norm
        self._multiplier = multiplier

    def __call__(self, x: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if branch is not None:
            if self._branch_norm is not None:
                branch = self._branch_norm(branch)
            x += branch if self._multiplier == 1.0 else branch * self._multiplier
        return x if self._next_norm is None else self._next_norm(x)


class NativeJoint:
    """All of it in one pass over the rows."""

    def __init__(self, call: JoinCall, buffer: GrowingBuffer, *, has_norm: bool) -> None:
        self._call = call
        self._buffer = buffer
        self._has_norm = has_norm

    def __call__(self, x: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if not self._has_norm:
            if branch is not None:
                self._call(x, branch, None)
            return x
        normed = self._buffer.rows(x.shape)
        self._call(x, branch, normed)
        return normed
