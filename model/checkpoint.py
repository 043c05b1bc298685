"""The safetensors files of a checkpoint directory: which tensors they hold, and one tensor at a time of them.

Headers are read first, so that everything wrong with names and shapes is known before any weight is in
memory. Tensors are mapped from one file at a time: pages of a mapped file count as memory of the process, and
a checkpoint of many shards would be there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.weight_files import weight_files
from forkpoint.model.weights import Shape

DAMAGED_HINT = "the file may be damaged or cut short; fetch the checkpoint again"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says. dtype: safetensors' name of it (BF16, F8_E4M3, ...)."""

    path: Path
    shape: Shape
    dtype: str


class Checkpoint:
    """The tensors of all shards by on-disk name; close() it. Mutable: remembers the file that is open."""

    def __init__(self, model_dir: Path) -> None:
        """Read every header. Raises ModelLoadError that names the file."""
        self._stored: dict[str, StoredTensor] = {}
        self._open_path: Path | None = None
        self._open_file: Any = None
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
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self._stored:
                    raise ModelLoadError(
                        f"tensor {name} is in {self._stored[name].path.name} and in {path.name}"
                    )
                header = file.get_slice(name)
                self._stored[name] = StoredTensor(path, tuple(header.get_shape()), str(header.get_dtype()))
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(f"{path} cannot be read: {exc}", hint=_damage(path)) from exc


def _damage(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "this is only a pointer that git left; fetch the file itself: git lfs pull"
    except OSError:
        return "check who may read the file"
    return DAMAGED_HINT
