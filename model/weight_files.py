"""Which files hold the weights of a checkpoint directory: one, or those that an index names."""

from __future__ import annotations

import json
from pathlib import Path

from forkpoint.configs.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(model_dir: Path) -> list[Path]:
    """The files of a checkpoint that has model.safetensors or shards with an index. Raises ModelLoadError."""
    index_path = model_dir / INDEX_FILE
    if not index_path.is_file():
        single = model_dir / SINGLE_FILE
        if not single.is_file():
            raise _no_weights(model_dir)
        return [single]
    names = shard_names(index_path)
    for name in names:
        if not (model_dir / name).is_file():
            raise ModelLoadError(
                f"{index_path} names {name}, which is not in {model_dir}",
                hint="the checkpoint is incomplete; fetch it again",
            )
    return [model_dir / name for name in names]


def shard_names(index_path: Path) -> list[str]:
    """File names in an index of shards, sorted. Raises ModelLoadError."""
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as exc:
        raise ModelLoadError(f"{index_path} is not an index of safetensors: {exc!r}") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{index_path} names {name!r}, which is no file name")
    return names


def _no_weights(model_dir: Path) -> ModelLoadError:
    message = f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    if pickles:
        return ModelLoadError(
            f"{message}, only {pickles[0]}: pickled weights can run code, so they are not read",
            hint="convert them: load with transformers and save_pretrained() writes safetensors",
        )
    others = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if others:
        return ModelLoadError(
            f"{message}, only {others[0]}", hint=f"name it {SINGLE_FILE} if it is the model"
        )
    return ModelLoadError(message, hint="only safetensors checkpoints are read")
