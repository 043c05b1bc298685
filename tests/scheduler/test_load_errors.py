"""A checkpoint that is wrong costs no memory: neither its weights nor KV pools are made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import save_tiny_checkpoint

from forkpoint.configs.errors import ModelLoadError
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.messages import LoadProgress

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


def _truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-1])


def _lose_tensor(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, directory / WEIGHTS)


def _misshape_last_tensor(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    save_file(tensors, directory / WEIGHTS)


def _add_tensor(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["extra"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / WEIGHTS)


def _change_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_truncate, WEIGHTS),
        (_lose_tensor, "model.norm.weight is missing"),
        (_misshape_last_tensor, "lm_head.weight has shape"),
        (_add_tensor, "does not use: extra"),
        (_change_architecture, "'mamba2'"),
    ],
)
def test_wrong_checkpoint_is_refused_before_anything_is_read_or_allocated(
    tiny_dir: Path, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    harmed = shutil.copytree(tiny_dir, tmp_path / "harmed")
    harm(harmed)
    stages: list[str] = []

    def report(progress: LoadProgress) -> None:
        stages.append(progress.what)

    with pytest.raises(ModelLoadError, match=message):
        build_engine(EngineConfig(harmed, device="cpu", dtype="float32", full_tokens=256), report)
    # Neither "loading weights" nor "warming up", which comes before the pools.
    assert set(stages) <= {"reading the configuration"}
    build_engine(EngineConfig(tiny_dir, device="cpu", dtype="float32", full_tokens=256), report)
    assert set(stages) == {"reading the configuration", "loading weights", "warming up"}
