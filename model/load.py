"""Read a checkpoint of safetensors strictly: what is missing, left over or misshapen is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import ModelConfig, load_config
from forkpoint.model.device import resolve_device, resolve_dtype
from forkpoint.model.families import FAMILIES
from forkpoint.model.weights import ModelWeights, Shape, build_weights, count_parameters, tensor_shapes

Progress = Callable[[int, int], None]

_FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
_DAMAGED_HINT = "the file may be damaged or cut short; fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: its configuration and its weights, all of one dtype on one device."""

    config: ModelConfig
    weights: ModelWeights
    dtype: torch.dtype
    device: torch.device
    num_parameters: int


def load_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> Model:
    """Load the checkpoint in model_dir (model.safetensors, or shards with an index).

    dtype, device: as --dtype and --device name them. progress is called with (tensors read, tensors in all).
    Peak memory is the result plus one layer.
    Raises ModelLoadError that names the file or the tensor, ConfigError for a wrong dtype or device.
    """
    torch_device = resolve_device(device)
    config = load_config(model_dir)
    torch_dtype = resolve_dtype(dtype, torch_device, config.checkpoint_dtype)
    with ExitStack() as open_files:
        checkpoint = _Checkpoint(model_dir, open_files)
        names = _match_names(config, checkpoint)
        read = _Reader(checkpoint, names, torch_dtype, torch_device, progress)
        weights = build_weights(config, read)
        if config.is_tied:
            _check_tied_head(config, checkpoint, names)
    return Model(config, weights, torch_dtype, torch_device, count_parameters(config))


class _Checkpoint:
    """The tensors of all shards by on-disk name; files stay open for the life of `open_files`."""

    def __init__(self, model_dir: Path, open_files: ExitStack) -> None:
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in _shards(model_dir):
            try:
                file = open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise ModelLoadError(f"{path} cannot be read: {exc}", hint=_DAMAGED_HINT) from exc
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self._file_of:
                    raise ModelLoadError(f"tensor {name} is in {self._path_of[name].name} and in {path.name}")
                self._file_of[name] = file
                self._path_of[name] = path

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> Shape:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise ModelLoadError(
                f"tensor {name} of {self._path_of[name]} cannot be read: {exc}", hint=_DAMAGED_HINT
            ) from exc
        return tensor


class _Reader:
    """Gives a tensor by our name, converted; counts what was read."""

    def __init__(
        self,
        checkpoint: _Checkpoint,
        names: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._num_read = 0

    def __call__(self, name: str) -> torch.Tensor:
        # copy=True: the tensor must not stay tied to the mapped file, which may be deleted or replaced.
        tensor = self._checkpoint.tensor(self._names[name]).to(self._device, self._dtype, copy=True)
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._names))
        return tensor


def _shards(model_dir: Path) -> list[Path]:
    single = model_dir / "model.safetensors"
    index_path = model_dir / "model.safetensors.index.json"
    if not index_path.is_file():
        if not single.is_file():
            raise ModelLoadError(
                f"{model_dir} has neither model.safetensors nor model.safetensors.index.json",
                hint="only safetensors checkpoints are read",
            )
        return [single]
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{index_path} is not an index of safetensors: {exc!r}") from exc
    for file_name in file_names:
        if Path(file_name).name != file_name or not (model_dir / file_name).is_file():
            raise ModelLoadError(f"{index_path} names {file_name}, which is not in {model_dir}")
    return [model_dir / file_name for file_name in file_names]


def _match_names(config: ModelConfig, checkpoint: _Checkpoint) -> dict[str, str]:
    """On-disk name of each of our tensors. Raises on any that is missing, left over or misshapen."""
    family = FAMILIES[config.family]
    names: dict[str, str] = {}
    for name, shape in tensor_shapes(config).items():
        on_disk = _on_disk_name(family.tensor_names, name)
        if on_disk not in checkpoint.names:
            raise ModelLoadError(f"tensor {on_disk} is missing from the checkpoint")
        if checkpoint.shape(on_disk) != shape:
            raise ModelLoadError(
                f"tensor {on_disk} has shape {list(checkpoint.shape(on_disk))}; "
                f"the configuration says {list(shape)}"
            )
        if checkpoint.dtype(on_disk) not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"tensor {on_disk} is {checkpoint.dtype(on_disk)}; only float weights are supported",
                hint="use the checkpoint with plain bfloat16 or float32 weights",
            )
        names[name] = on_disk
    allowed = set(names.values())
    if config.is_tied:
        allowed.add(family.tensor_names["lm_head"])
    unused = sorted(
        name
        for name in checkpoint.names - allowed
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored)
    )
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise ModelLoadError(
            f"the checkpoint has tensors that this model does not use: {', '.join(unused[:5])}{more}"
        )
    return names


def _on_disk_name(tensor_names: Mapping[str, str], name: str) -> str:
    prefix, _, rest = name.partition(".")
    if prefix != "layers":
        return tensor_names[name]
    layer, _, leaf = rest.partition(".")
    return tensor_names[f"layers.{{i}}.{leaf}"].format(i=layer)


def _check_tied_head(config: ModelConfig, checkpoint: _Checkpoint, names: Mapping[str, str]) -> None:
    # Some exporters store the tied head too. That is harmless only if it is the embedding.
    head = FAMILIES[config.family].tensor_names["lm_head"]
    if head in checkpoint.names and not torch.equal(
        checkpoint.tensor(head), checkpoint.tensor(names["embedding"])
    ):
        raise ModelLoadError(
            f"tensor {head} differs from the embedding, but the configuration ties them (tie_word_embeddings)"
        )
