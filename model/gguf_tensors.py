"""Tensors of a GGUF file as safetensors shards: names and layout of transformers, dequantised one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import safetensors
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError

WeightsDtype = Literal["float32", "bfloat16"]
BYTES_PER_WEIGHT: dict[WeightsDtype, int] = {"float32": 4, "bfloat16": 2}
# A shard is in memory as a whole while it is written, so this and the largest tensor bound the peak.
SHARD_BYTES = 512 * 2**20
ROPE_FACTORS = "rope_freqs.weight"  # becomes a part of config.json

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QKV_BIAS_NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_GEMMA_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FAMILY_LAYER_NAMES = {
    "llama": _LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"},
    "qwen2": _LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"},
    "qwen3": _LAYER_NAMES | _QK_NORM_NAMES | {"ffn_norm": "post_attention_layernorm"},
    "gemma2": _LAYER_NAMES | _GEMMA_NORM_NAMES,
    "gemma3": _LAYER_NAMES | _QK_NORM_NAMES | _GEMMA_NORM_NAMES,
}
_FAMILY_BIAS_NAMES = {"qwen2": _QKV_BIAS_NAMES}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")


def target_names(architecture: str, names: Sequence[str], *, num_layers: int) -> dict[str, str]:
    """Name in transformers of every tensor of the file but rope_freqs.weight.

    Raises ModelLoadError that names the tensors which have none, and those which are missing.
    """
    layer_names = _FAMILY_LAYER_NAMES[architecture]
    expected = dict(_GLOBAL_NAMES)
    for layer in range(num_layers):
        for source, target in layer_names.items():
            expected[f"blk.{layer}.{source}.weight"] = f"model.layers.{layer}.{target}.weight"
        for source, target in _FAMILY_BIAS_NAMES.get(architecture, {}).items():
            expected[f"blk.{layer}.{source}.bias"] = f"model.layers.{layer}.{target}.bias"
    unused = sorted(set(names) - expected.keys() - {ROPE_FACTORS})
    if unused:
        raise ModelLoadError(
            f"the GGUF file has {_listed(unused)}, which no {architecture} model uses",
            hint="serve the original checkpoint (a directory with safetensors) instead",
        )
    missing = sorted(expected.keys() - set(names) - {"output.weight"})
    if missing:
        raise ModelLoadError(f"the GGUF file lacks {_listed(missing)}", hint="is the file complete?")
    return {name: expected[name] for name in names if name != ROPE_FACTORS}


def dequantised(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """The tensor's values, in the shape that transformers gives it."""
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as exc:
        raise ModelLoadError(
            f"{tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read"
        ) from exc
    return np.ascontiguousarray(values, dtype=np.float32).reshape([int(n) for n in reversed(tensor.shape)])


def restored(
    architecture: str, name: str, values: NDArray[np.float32], *, num_heads: int, num_kv_heads: int
) -> NDArray[np.float32]:
    """Undo what llama.cpp's converter did to the values of one tensor."""
    match = _LAYER_TENSOR.fullmatch(name)
    part = match[2] if match else name
    if architecture.startswith("gemma") and "norm" in part:
        return values - np.float32(1)  # the file holds 1 + w; the model adds the 1 itself
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        # Rope turns neighbours (0,1)(2,3).. in llama.cpp, halves (0,D/2)(1,D/2+1).. in transformers.
        heads = num_heads if part == "attn_q" else num_kv_heads
        rows, columns = values.shape
        pairs = values.reshape(heads, rows // heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
    return values


def write_shards(
    directory: Path,
    tensors: Iterator[tuple[str, NDArray[np.float32]]],
    *,
    sizes: Sequence[int],
    dtype: WeightsDtype,
    on_tensor: Callable[[int], None],
) -> None:
    """Write `tensors` (name and values) as safetensors files with an index, in the order given.

    sizes: elements of each tensor, in the same order. on_tensor: called with the number of tensors that are
        done.
    """
    groups = _shard_groups([size * BYTES_PER_WEIGHT[dtype] for size in sizes])
    files = [_shard_name(i, len(groups)) for i in range(len(groups))]
    weight_map: dict[str, str] = {}
    for file, group in zip(files, groups, strict=True):
        # The writer takes addresses, not arrays: `held` keeps them valid until the file is written.
        held: list[NDArray[Any]] = []
        shard: dict[str, safetensors.TensorSpec] = {}
        for _ in group:
            name, values = next(tensors)
            held.append(_stored(values, dtype))
            shard[name] = safetensors.TensorSpec(
                dtype=dtype, shape=values.shape, data_ptr=held[-1].ctypes.data, data_len=held[-1].nbytes
            )
            weight_map[name] = file
            on_tensor(len(weight_map))
        safetensors.serialize_file(shard, str(directory / file), {"format": "pt"})
    if len(files) > 1:
        total_size = sum(sizes) * BYTES_PER_WEIGHT[dtype]
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _stored(values: NDArray[np.float32], dtype: WeightsDtype) -> NDArray[Any]:
    if dtype == "bfloat16":
        # numpy has no bfloat16; gguf rounds to the nearest and gives the bits.
        return np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType.BF16))
    return values


def _shard_groups(sizes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    used = 0
    for i, size in enumerate(sizes):
        if groups[-1] and used + size > SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += size
    return groups


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more tensors" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
