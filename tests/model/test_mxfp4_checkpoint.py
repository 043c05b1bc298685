"""A gpt-oss whose experts are stored in MXFP4 computes what transformers does with the decoded numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.golden import (
    PROMPT_LENGTH,
    TOLERANCE,
    largest_error,
    poisoned_world,
    random_prompt,
    run_in_chunks,
)
from support.tiny_checkpoints import reference_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.load import load_model

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")


@pytest.fixture(scope="module")
def packed_dir(checkpoints: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts as *_blocks and *_scales, as on the hub; `plain` beside it has the same numbers as floats."""
    root = tmp_path_factory.mktemp("mxfp4")
    packed_dir = shutil.copytree(checkpoints["gpt_oss"], root / "packed")
    plain_dir = shutil.copytree(checkpoints["gpt_oss"], root / "plain")
    plain: Tensors = load_file(packed_dir / WEIGHTS)
    packed: Tensors = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in plain.items():
        if EXPERTS.fullmatch(name) is None:
            packed[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        shape = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        # Numbers of the size that a tiny model's weights have: 2^-6 to 2^-3 times up to 6.
        scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == tensor.shape
    save_file(packed, packed_dir / WEIGHTS)
    save_file(plain, plain_dir / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((packed_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed_dir / "config.json").write_text(json.dumps(config))
    return packed_dir


def test_logits_equal_those_of_the_decoded_weights(packed_dir: Path) -> None:
    tokens = random_prompt(seed=11)
    world = poisoned_world(
        load_model(packed_dir, dtype="float32", device="cpu"), page_size=4, backend="torch"
    )
    sequence = run_in_chunks(world, tokens, PROMPT_LENGTH)
    assert largest_error(sequence, reference_logits(packed_dir.parent / "plain", tokens)) < TOLERANCE


def test_packed_and_plain_weights_are_the_same_model_in_bfloat16(packed_dir: Path) -> None:
    packed, plain = (
        load_model(packed_dir.parent / name, dtype="bfloat16", device="cpu") for name in ("packed", "plain")
    )
    assert packed.num_parameters == plain.num_parameters
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    for ours, theirs in zip(packed.weights.layers, plain.weights.layers, strict=True):
        assert torch.equal(ours.mlp(x), theirs.mlp(x))


def _lose_scales(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def _cut_blocks(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name][:, :, :1].contiguous()


def _widen_blocks(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name].to(torch.int16)


def _make_a_scale_nan(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][5, 0, 0] = 255


def _store_floats_too(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(8, 96, 64)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_lose_scales, r"down_proj_scales is missing"),
        (_cut_blocks, r"gate_up_proj_blocks has shape"),
        (_widen_blocks, r"gate_up_proj_blocks is I16; only U8"),
        (_make_a_scale_nan, r"layers\.1\.mlp\.experts\.down_proj_scales, expert 5: .*NaN"),
        (_store_floats_too, r"does not use: .*down_proj_blocks"),
    ],
)
def test_fault_of_packed_weights_is_named(
    packed_dir: Path, tmp_path: Path, harm: Callable[[Tensors], None], message: str
) -> None:
    copy = shutil.copytree(packed_dir, tmp_path / "copy")
    tensors = load_file(copy / WEIGHTS)
    harm(tensors)
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(ModelLoadError, match=message):
        load_model(copy, dtype="float32", device="cpu")
