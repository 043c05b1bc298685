"""The safetensors files of a checkpoint directory: which tensors they hold, and one tensor at a time of them.

Headers are read first, so that everything wrong with names and shapes is known before any weight is in
memory. Weights are read, not mapped: pages of a mapped file count as memory of the process, so that every
weight would be there twice.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.weight_files import weight_files
from forkpoint.model.weights import Shape

# What is converted lies in memory twice, this much at a time.
PIECE_BYTES = 8 * 2**20

DAMAGED_HINT = "the file may be damaged or cut short; fetch the checkpoint again"
_LFS_POINTER = b"version https://git-lfs"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says. dtype: safetensors' name of it (BF16, F8_E4M3, ...).

    start: its first byte in the file.
    """

    path: Path
    start: int
    shape: Shape
    dtype: str


class Checkpoint:
    """The tensors of all shards by on-disk name; close() it. Mutable: remembers the file that is open."""

    def __init__(self, model_dir: Path) -> None:
        """Read every header. Raises ModelLoadError that names the file."""
        self._stored: dict[str, StoredTensor] = {}
        self._open_path: Path | None = None
        self._open_file: Any = None
        # One for all tensors: freed between what stays, pieces would leave holes that the process keeps.
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for path in weight_files(model_dir):
            self._read_header(path)
        self.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def tensor(self, name: str, part: int | None = None) -> torch.Tensor:
        """The tensor, or [part] of its first dimension; mapped from the file, so copy what is to stay."""
        path = self._stored[name].path
        try:
            file = self._file(path)
            tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(f"tensor {name} of {path} cannot be read: {exc}", hint=DAMAGED_HINT) from exc
        return tensor

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill `into`, contiguous, of the tensor's shape and on the CPU, with the tensor in into's dtype.

        Takes PIECE_BYTES beside it at most. Only for numbers that torch has (load.py sees to that). Raises
        ModelLoadError that names the tensor.
        """
        stored = self._stored[name]
        assert into.shape == stored.shape and into.is_contiguous()
        numbers = into.view(-1)
        own_dtype = _DTYPES[stored.dtype]
        try:
            with open(stored.path, "rb", buffering=0) as file:
                file.seek(stored.start)
                if own_dtype == into.dtype:
                    _fill(file, numbers)
                    return
                piece = self._piece.view(own_dtype)
                for start in range(0, len(numbers), len(piece)):
                    part = piece[: len(numbers) - start]
                    _fill(file, part)
                    numbers[start : start + len(part)] = part
        except OSError as exc:
            raise ModelLoadError(
                f"tensor {name} of {stored.path} cannot be read: {exc}", hint=DAMAGED_HINT
            ) from exc

    def close(self) -> None:
        """Unmap the file that is open; idempotent."""
        self._open_path = self._open_file = None

    def _file(self, path: Path) -> Any:
        if path != self._open_path:
            self.close()
            self._open_file = safe_open(path, framework="pt")
            self._open_path = path
        return self._open_file

    def _read_header(self, path: Path) -> None:
        try:
            file = self._file(path)
            starts = _first_bytes(path)
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self._stored:
                    raise ModelLoadError(
                        f"tensor {name} is in {self._stored[name].path.name} and in {path.name}"
                    )
                header = file.get_slice(name)
                self._stored[name] = StoredTensor(
                    path, starts[name], tuple(header.get_shape()), str(header.get_dtype())
                )
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(f"{path} cannot be read: {exc}", hint=_damage(path)) from exc


def _first_bytes(path: Path) -> dict[str, int]:
    """Where each tensor begins, by the header of a file that safetensors has found to be whole."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: 8 + header_bytes + entry["data_offsets"][0] for name, entry in header.items()}


def _fill(file: io.RawIOBase, numbers: torch.Tensor) -> None:
    """Read as many bytes as `numbers` has, in the order of memory."""
    target = numbers.view(torch.uint8).numpy().data
    while len(target):
        num_read = file.readinto(target)
        if not num_read:
            raise OSError("the file ends before its tensors do")
        target = target[num_read:]


def _damage(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "this is only a pointer that git left; fetch the file itself: git lfs pull"
    except OSError:
        return "check who may read the file"
    return DAMAGED_HINT
