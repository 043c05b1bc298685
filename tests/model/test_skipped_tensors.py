"""Tensors that a model is served without are named in one line of the log, by group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog
from safetensors import safe_open

from forkpoint.model.load import load_model


def test_vision_part_of_a_multimodal_model_is_skipped_and_named(checkpoints: Mapping[str, Path]) -> None:
    with structlog.testing.capture_logs() as lines:
        model = load_model(checkpoints["gemma3_multimodal"], dtype="float32", device="cpu")
    with safe_open(checkpoints["gemma3_multimodal"] / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    num_seeing = len([name for name in names if name.startswith(("vision_tower", "multi_modal_projector"))])
    assert 0 < num_seeing < len(names)
    (line,) = [line for line in lines if line["event"] == "tensors_skipped"]
    assert line["count"] == num_seeing
    assert "vision_tower." in line["names"] and "multi_modal_projector." in line["names"]
    assert model.config.layer_pattern.count("F") >= 1


def test_nothing_is_said_when_every_tensor_is_used(checkpoints: Mapping[str, Path]) -> None:
    with structlog.testing.capture_logs() as lines:
        load_model(checkpoints["qwen3"], dtype="float32", device="cpu")
    assert lines == []
