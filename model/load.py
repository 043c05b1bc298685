"""Read a checkpoint of safetensors strictly: what is missing, left over or misshapen is an error."""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from forkpoint.configs.errors import ConfigError, ModelLoadError
from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig, load_config
from forkpoint.model.device import resolve_device, resolve_dtype
from forkpoint.model.families import FAMILIES
from forkpoint.model.int8 import Int8Layers, check_int8, int8_bytes
from forkpoint.model.layer_maker import FloatLayers, LayerMaker
from forkpoint.model.linear import copies_weights
from forkpoint.model.mxfp4 import BLOCK_SIZE, BYTES_PER_BLOCK, decode_mxfp4
from forkpoint.model.native.int8 import int8_kernels
from forkpoint.model.scope import PLAIN_WEIGHTS_HINT
from forkpoint.model.weights import (
    ModelWeights,
    ReadTensor,
    Shape,
    build_weights,
    count_parameters,
    is_float32,
    num_inputs,
    tensor_shapes,
)

Progress = Callable[[int, int], None]

_FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
# A name of ours with the number of its layer, and of its expert if experts are stored one by one.
_NUMBERED = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(\w+)")

_log = structlog.stdlib.get_logger("forkpoint.engine")


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: its configuration and its weights, which compute in one dtype on one device.

    quantization: as load_model was told. weight_bytes: memory that the weights take there.
    """

    config: ModelConfig
    weights: ModelWeights
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    weight_bytes: int
    quantization: str = "none"


def load_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    load_format: str = "auto",
    quantization: str = "none",
    progress: Progress | None = None,
) -> Model:
    """Load the checkpoint in model_dir (model.safetensors, or shards with an index).

    dtype, device: as --dtype and --device name them. load_format `dummy`: random weights, the same each time;
    model_dir needs config.json only. progress is called with (tensors read, tensors in all).
    quantization `int8`: layers and embedding are turned into int8 as they are read (int8.py).
    Peak memory is the result and one layer; all names and shapes are checked before any of it.
    Raises ModelLoadError that names the file or the tensor, ConfigError for a wrong dtype, device or
    quantization.
    """
    torch_device = resolve_device(device)
    config = load_config(model_dir)
    torch_dtype = resolve_dtype(dtype, torch_device, config.checkpoint_dtype)
    maker = _layer_maker(quantization, torch_dtype, torch_device)
    if load_format == "dummy":
        read: ReadTensor = _dummy_reader(config, torch_dtype, torch_device, progress)
        weights = build_weights(config, read, maker)
    else:
        with contextlib.closing(Checkpoint(model_dir)) as checkpoint:
            sources = _find_sources(config, checkpoint)
            read = _Reader(checkpoint, sources, torch_dtype, torch_device, progress)
            weights = build_weights(config, read, maker)
            if config.is_tied:
                _check_tied_head(config, checkpoint, sources)
    if quantization == "int8":
        weight_bytes = _int8_weight_bytes(config, torch_dtype)
    else:
        weight_bytes = _weight_bytes(config, torch_dtype, torch_device)
    num_parameters = count_parameters(config)
    return Model(config, weights, torch_dtype, torch_device, num_parameters, weight_bytes, quantization)


def _layer_maker(quantization: str, dtype: torch.dtype, device: torch.device) -> LayerMaker:
    if quantization == "none":
        return FloatLayers()
    if quantization != "int8":
        raise ConfigError(
            f"quantization {quantization!r} is unknown", hint="--quantization takes none or int8"
        )
    check_int8(device)
    return Int8Layers(dtype, int8_kernels())


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one of our tensors comes from. exponents: on-disk name of them if `name` holds MXFP4 blocks."""

    name: str
    shape: Shape
    exponents: str | None = None


class _Reader:
    """Gives a tensor by our name, converted; counts what was read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, _Source],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._sources = sources
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._num_read = 0

    def __call__(self, *names: str) -> torch.Tensor:
        sources = [self._sources[name] for name in names]
        exponents = sources[0].exponents
        if exponents is not None:
            assert len(sources) == 1
            tensor = self._decoded(sources[0], exponents)
            self._count()
            return tensor
        return self._joined(sources, torch.float32 if is_float32(names[0]) else self._dtype)

    def _count(self) -> None:
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._sources))

    def _joined(self, sources: Sequence[_Source], dtype: torch.dtype) -> torch.Tensor:
        num_rows = [source.shape[0] for source in sources]
        # Parts go where they belong at once: freed copies of them would leave holes that the process keeps.
        tensor = torch.empty((sum(num_rows), *sources[0].shape[1:]), dtype=dtype)
        for source, part in zip(sources, tensor.split(num_rows), strict=True):
            self._checkpoint.read(source.name, part)
            self._count()
        return tensor.to(self._device)

    def _decoded(self, source: _Source, exponents: str) -> torch.Tensor:
        # Expert by expert: all of them in float32 would be eight times the file.
        tensor = torch.empty(source.shape, dtype=self._dtype, device=self._device)
        for expert in range(source.shape[0]):
            try:
                numbers = decode_mxfp4(
                    self._checkpoint.tensor(source.name, expert).to(self._device),
                    self._checkpoint.tensor(exponents, expert).to(self._device),
                )
            except ValueError as exc:
                raise ModelLoadError(f"tensor {exponents}, expert {expert}: {exc}") from exc
            tensor[expert] = numbers.T
        return tensor


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    shapes = tensor_shapes(config)
    if config.is_tied and copies_weights(dtype, device):
        shapes["lm_head"] = shapes["embedding"]
    return sum(
        math.prod(shape) * (torch.float32 if is_float32(name) else dtype).itemsize
        for name, shape in shapes.items()
    )


def _int8_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    num_bytes = 0
    for name, shape in tensor_shapes(config).items():
        inputs = num_inputs(name, shape)
        if inputs is None:
            num_bytes += math.prod(shape) * (torch.float32 if is_float32(name) else dtype).itemsize
        else:
            num_bytes += int8_bytes(math.prod(shape) // inputs, inputs)
    return num_bytes


def _dummy_reader(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> ReadTensor:
    """Random tensors of the right shapes; each depends on its name alone, so every start has the same."""
    shapes = tensor_shapes(config)
    num_read = 0

    def read(*names: str) -> torch.Tensor:
        return torch.cat([read_one(name) for name in names]) if len(names) > 1 else read_one(names[0])

    def read_one(name: str) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        if progress is not None:
            progress(num_read, len(shapes))
        shape = shapes[name]
        own_dtype = torch.float32 if is_float32(name) else dtype
        if name.endswith("norm"):
            is_zero_neutral = config.norm == "rms_plus_one"
            return torch.full(shape, 0.0 if is_zero_neutral else 1.0, dtype=own_dtype, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        # Of variance 1 / inputs, so that activations neither grow nor fade from layer to layer.
        bound = (3 / shape[-1]) ** 0.5
        return torch.empty(shape, dtype=own_dtype, device=device).uniform_(-bound, bound, generator=generator)

    return read


def _find_sources(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, _Source]:
    """The source of each of our tensors. Raises on any that is missing, left over or misshapen."""
    family = FAMILIES[config.family]
    sources: dict[str, _Source] = {}
    allowed: set[str] = set()
    for name, shape in tensor_shapes(config).items():
        source = _source(on_disk_name(family.tensor_names, name), shape, checkpoint)
        sources[name] = source
        allowed |= {source.name, source.exponents or source.name}
    if config.is_tied:
        allowed.add(family.tensor_names["lm_head"])
    left = checkpoint.names - allowed
    skipped = {name for name in left if any(re.fullmatch(pattern, name) for pattern in family.ignored)}
    if unused := sorted(left - skipped):
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise ModelLoadError(
            f"the checkpoint has tensors that this model does not use: {', '.join(unused[:5])}{more}"
        )
    if skipped:
        _log.info("tensors_skipped", count=len(skipped), names=_grouped(skipped))
    return sources


def _source(on_disk: str, shape: Shape, checkpoint: Checkpoint) -> _Source:
    blocks, exponents = f"{on_disk}_blocks", f"{on_disk}_scales"
    if on_disk not in checkpoint.names and blocks in checkpoint.names and len(shape) == 3:
        num_experts, num_in, num_out = shape
        num_blocks = num_in // BLOCK_SIZE
        _check(checkpoint, blocks, (num_experts, num_out, num_blocks, BYTES_PER_BLOCK), ("U8",))
        _check(checkpoint, exponents, (num_experts, num_out, num_blocks), ("U8",))
        return _Source(blocks, shape, exponents)
    _check(checkpoint, on_disk, shape, _FLOAT_DTYPES)
    return _Source(on_disk, shape)


def _check(checkpoint: Checkpoint, name: str, shape: Shape, dtypes: tuple[str, ...]) -> None:
    if name not in checkpoint.names:
        raise ModelLoadError(f"tensor {name} is missing from the checkpoint")
    found = checkpoint[name]
    if found.dtype not in dtypes:
        wanted = "float weights" if dtypes == _FLOAT_DTYPES else " or ".join(dtypes)
        raise ModelLoadError(
            f"tensor {name} is {found.dtype}; only {wanted} can be read here", hint=PLAIN_WEIGHTS_HINT
        )
    if found.shape != shape:
        raise ModelLoadError(
            f"tensor {name} has shape {list(found.shape)}; the configuration says {list(shape)}"
        )


def on_disk_name(tensor_names: Mapping[str, str], name: str) -> str:
    """What our tensor `name` (layers.3.experts.7.gate) is called on disk, by a family's table."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return tensor_names[name]
    layer, expert, leaf = found.groups()
    if expert is None:
        return tensor_names[f"layers.{{i}}.{leaf}"].format(i=layer)
    return tensor_names[f"layers.{{i}}.experts.{{e}}.{leaf}"].format(i=layer, e=expert)


def _grouped(names: set[str]) -> str:
    """For people: `vision_tower.* (300), multi_modal_projector.* (2)`."""
    groups = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{group}.* ({count})" for group, count in sorted(groups.items()))


def _check_tied_head(config: ModelConfig, checkpoint: Checkpoint, sources: Mapping[str, _Source]) -> None:
    # Some exporters store the tied head too. That is harmless only if it is the embedding.
    head = FAMILIES[config.family].tensor_names["lm_head"]
    if head not in checkpoint.names:
        return
    embedding = sources["embedding"].name
    # The embedding is copied: the two may lie in different files, of which one at a time is mapped.
    if not torch.equal(checkpoint.tensor(embedding).clone(), checkpoint.tensor(head)):
        raise ModelLoadError(
            f"tensor {head} differs from the embedding, but the configuration ties them (tie_word_embeddings)"
        )
