"""Loading is strict: every missing, unused, misshapen or damaged tensor is an error that names it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import CONFIGS, save_tiny_checkpoint
from transformers import LlamaConfig

from forkpoint.configs.errors import ConfigError, ModelLoadError
from forkpoint.model.checkpoint import PIECE_BYTES
from forkpoint.model.checkpoint import Checkpoint as StoredCheckpoint
from forkpoint.model.config import LinearScaling, Llama3Scaling, load_config
from forkpoint.model.families import FAMILIES
from forkpoint.model.load import load_model, on_disk_name
from forkpoint.model.weights import tensor_shapes

Checkpoints = Mapping[str, Path]
Tensors = dict[str, torch.Tensor]


def _copy(source: Path, target: Path, *, edit_tensors: Callable[[Tensors], None] | None = None) -> Path:
    shutil.copytree(source, target)
    if edit_tensors is not None:
        tensors = load_file(target / "model.safetensors")
        edit_tensors(tensors)
        save_file(tensors, target / "model.safetensors")
    return target


def _edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def test_config_of_gemma3_is_read_in_full(checkpoints: Checkpoints) -> None:
    config = load_config(checkpoints["gemma3"])
    assert config.layer_pattern == "SSSSSFSF"
    assert (config.kinds, config.window) == (("full", "swa"), 12)
    assert (config.eos_token_ids, config.context_length) == ((1, 106), 512)
    assert (config.is_tied, config.final_softcap, config.embedding_multiplier) == (True, 30.0, 8.0)
    sliding, full = config.layers[0], config.layers[5]
    assert sliding.rope is not None and full.rope is not None
    assert (sliding.rope.theta, sliding.rope.scaling) == (1000.0, None)
    assert (full.rope.theta, full.rope.scaling) == (50000.0, LinearScaling(8.0))
    assert sliding.attention_scale == 24**-0.5
    # 2 full layers, 2 KV heads, 32 + 32 dims, 4 bytes
    assert config.kv_bytes_per_token("full", torch.float32) == 2 * 2 * 64 * 4
    assert config.kv_bytes_per_token("swa", torch.bfloat16) == 6 * 2 * 64 * 2


def test_config_of_llama_has_no_window(checkpoints: Checkpoints) -> None:
    config = load_config(checkpoints["llama"])
    assert (config.kinds, config.window, config.is_tied) == (("full",), None, False)
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.scaling == Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert config.kv_bytes_per_token("swa", torch.float32) == 0


def test_end_of_text_ids_of_both_files_count(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copy = _copy(checkpoints["qwen3"], tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_config(copy).eos_token_ids == (1, 7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "architecture 'mamba2'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "relu"}, "activation 'relu'"),
        ({"layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
    ],
)
def test_unsupported_configurations_are_named(
    checkpoints: Checkpoints, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copy = _copy(checkpoints["gemma3"], tmp_path / "copy")
    _edit_json(copy / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_config(copy)


def test_unsupported_rope_scaling_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copy = _copy(checkpoints["llama"], tmp_path / "copy")
    _edit_json(
        copy / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(ModelLoadError, match="'dynamic'"):
        load_config(copy)


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense"])
def test_broken_config_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)


def test_directory_without_a_model_is_an_error(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.7.self_attn.o_proj.bias",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_missing_tensor_is_named(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors[name]

    copy = _copy(checkpoints["gemma3"], tmp_path / "copy", edit_tensors=remove)
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        load_model(copy)


def test_unused_tensor_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def add_sinks(tensors: Tensors) -> None:
        tensors["model.layers.2.self_attn.sinks"] = torch.zeros(4)

    copy = _copy(checkpoints["gemma3"], tmp_path / "copy", edit_tensors=add_sinks)
    with pytest.raises(ModelLoadError, match=r"does not use: model\.layers\.2\.self_attn\.sinks"):
        load_model(copy)


def test_rope_tables_of_old_llama_checkpoints_are_ignored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def add_rope_table(tensors: Tensors) -> None:
        tensors["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    load_model(_copy(checkpoints["llama"], tmp_path / "copy", edit_tensors=add_rope_table))


def test_wrong_shape_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1]

    copy = _copy(checkpoints["qwen3"], tmp_path / "copy", edit_tensors=cut)
    with pytest.raises(
        ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[95, 64\].*\[96, 64\]"
    ):
        load_model(copy)


def test_integer_weights_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(
            torch.int8
        )

    copy = _copy(checkpoints["qwen3"], tmp_path / "copy", edit_tensors=quantise)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight is I8"):
        load_model(copy)


def test_float8_weights_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

    copy = _copy(checkpoints["qwen3"], tmp_path / "copy", edit_tensors=quantise)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is F8_E4M3; only float weights"):
        load_model(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_weights_of_any_width_are_converted(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype
) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)

    copy = _copy(checkpoints["llama"], tmp_path / "copy", edit_tensors=narrow)
    model = load_model(copy, dtype="float32", device="cpu")
    expected = load_file(checkpoints["llama"] / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.weights.embedding(torch.arange(len(expected))), expected.to(dtype).float())


@pytest.mark.parametrize("kept_bytes", [0, 100, 10_000, -1])
def test_truncated_file_is_named(checkpoints: Checkpoints, tmp_path: Path, kept_bytes: int) -> None:
    copy = _copy(checkpoints["qwen3"], tmp_path / "copy")
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(copy)


@pytest.mark.parametrize(
    "header",
    [
        b"nonsense",
        b"\xff" * 64,
        (20).to_bytes(8, "little") + b"this is not any JSON",
        (2).to_bytes(8, "little") + b"[]",
        (100).to_bytes(8, "little")
        + b'{"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    ],
)
def test_garbage_for_a_header_names_the_file(checkpoints: Checkpoints, tmp_path: Path, header: bytes) -> None:
    copy = _copy(checkpoints["qwen3"], tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_model(copy)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_a_header_is_an_error_of_loading_or_harmless(
    checkpoints: Checkpoints, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray((checkpoints["qwen3"] / "model.safetensors").read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    shutil.copy(checkpoints["qwen3"] / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        load_model(tmp_path, dtype="float32", device="cpu")
    except ModelLoadError as error:
        assert re.search(r"tensor|model\.safetensors", str(error))


def test_pointer_of_git_lfs_is_told_from_a_damaged_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copy = _copy(checkpoints["qwen3"], tmp_path / "copy")
    (copy / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(ModelLoadError) as error:
        load_model(copy)
    assert "git lfs pull" in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("pytorch_model.bin", "pickled weights can run code", "save_pretrained"),
        ("weights.safetensors", "only weights.safetensors", "name it model.safetensors"),
    ],
)
def test_other_weight_files_are_explained(
    checkpoints: Checkpoints, tmp_path: Path, name: str, message: str, hint: str
) -> None:
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=message) as error:
        load_model(tmp_path)
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": 3}}',
    ],
)
def test_broken_index_of_shards_is_named(checkpoints: Checkpoints, tmp_path: Path, index: str) -> None:
    copy = _copy(checkpoints["llama"], tmp_path / "copy")
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load_model(copy)


def test_nothing_is_read_of_a_checkpoint_that_is_wrong(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def misshape(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.zeros(3)  # read last

    reports: list[int] = []
    copy = _copy(checkpoints["llama"], tmp_path / "copy", edit_tensors=misshape)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[3\]"):
        load_model(copy, progress=lambda done, _: reports.append(done))
    assert reports == []


def test_stored_head_of_a_tied_model_must_be_the_embedding(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def store_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def store_other_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    load_model(_copy(checkpoints["qwen3"], tmp_path / "same", edit_tensors=store_head))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from the embedding"):
        load_model(_copy(checkpoints["qwen3"], tmp_path / "other", edit_tensors=store_other_head))


def test_sharded_checkpoint_equals_a_single_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    sharded = save_tiny_checkpoint("llama", tmp_path / "sharded", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    probe = torch.randn(5, 64)
    whole = load_model(checkpoints["llama"], dtype="float32", device="cpu")
    parts = load_model(sharded, dtype="float32", device="cpu")
    every_token = torch.arange(whole.config.vocab_size)
    assert torch.equal(whole.weights.embedding(every_token), parts.weights.embedding(every_token))
    for a, b in zip(whole.weights.layers, parts.weights.layers, strict=True):
        assert torch.equal(a.qkv(probe), b.qkv(probe))
        assert torch.equal(a.mlp(probe), b.mlp(probe))
    assert torch.equal(whole.weights.lm_head(probe), parts.weights.lm_head(probe))


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float32])
def test_loading_takes_little_beside_the_weights(tmp_path: Path, file_dtype: torch.dtype) -> None:
    shard_bytes = 24 * 2**20
    model_dir = _sharded_checkpoint(tmp_path / "large", shard_bytes=shard_bytes, dtype=file_dtype)
    file_bytes = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    weight_bytes = file_bytes * torch.bfloat16.itemsize // file_dtype.itemsize
    assert weight_bytes > 6 * shard_bytes  # else a shard that stays would not be seen
    # In a process of its own: the peak of this one is whatever an earlier test needed.
    report = subprocess.run(
        [sys.executable, "-c", _MEASURE_LOAD, str(model_dir)], capture_output=True, text=True, check=True
    )
    before, after, peak = map(int, report.stdout.split())
    slack = 64 * 2**20  # a piece that is converted, and what libraries and the allocator take (25 to 50 MB)
    assert after - before >= weight_bytes - 2**20
    assert peak - before <= weight_bytes + slack


# VmHWM is the most that was ever resident; the kernel counts pages of mapped files in.
_MEASURE_LOAD = """
import re, sys
from pathlib import Path
from forkpoint.model.config import load_config
from forkpoint.model.families import FAMILIES
from forkpoint.model.load import load_model, on_disk_name
from forkpoint.model.weights import tensor_shapes

def resident(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

model_dir = Path(sys.argv[1])
load_config(model_dir)
before = resident("VmRSS")
model = load_model(model_dir, dtype="bfloat16", device="cpu")
print(before, resident("VmRSS"), resident("VmHWM"))
"""


def _sharded_checkpoint(directory: Path, *, shard_bytes: int, dtype: torch.dtype) -> Path:
    """A llama of ones in many shards."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(directory)
    shards: list[Tensors] = [{}]
    for name, shape in tensor_shapes(load_config(directory)).items():
        tensor = torch.ones(shape, dtype=dtype)
        if sum(held.nbytes for held in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][on_disk_name(FAMILIES["llama"].tensor_names, name)] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        save_file(shard, directory / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = save_tiny_checkpoint("llama", tmp_path / "sharded", max_shard_size="200KB")
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=lost.name):
        load_model(sharded)


def test_progress_counts_every_tensor_once(checkpoints: Checkpoints) -> None:
    reports: list[tuple[int, int]] = []
    model = load_model(checkpoints["llama"], progress=lambda done, total: reports.append((done, total)))
    total = len(load_file(checkpoints["llama"] / "model.safetensors"))
    assert reports == [(done, total) for done in range(1, total + 1)]
    assert model.num_parameters == sum(
        tensor.numel() for tensor in load_file(checkpoints["llama"] / "model.safetensors").values()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_dummy_weights_need_no_files_and_are_the_same_each_time(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    shutil.copy(checkpoints[name] / "config.json", tmp_path)
    first, second = (load_model(tmp_path, device="cpu", load_format="dummy") for _ in range(2))
    probe = torch.randn(3, 64, dtype=first.dtype)
    assert first.num_parameters == load_model(checkpoints[name], device="cpu").num_parameters
    every_token = torch.arange(first.config.vocab_size)
    assert torch.equal(first.weights.embedding(every_token), second.weights.embedding(every_token))
    for a, b in zip(first.weights.layers, second.weights.layers, strict=True):
        assert torch.equal(a.mlp(probe), b.mlp(probe))
    one, other = (layer.mlp(probe) for layer in first.weights.layers[:2])
    assert not torch.equal(one, other)
    assert 0.1 < one.float().std() < 10


def test_unknown_dtype_and_device_name_the_flag(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="float8") as error:
        load_model(checkpoints["llama"], dtype="float8")
    assert error.value.hint == "--dtype"
    with pytest.raises(ConfigError, match="tpu"):
        load_model(checkpoints["llama"], device="tpu")


def test_cuda_without_a_device_is_a_clear_error(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as on a machine without one
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_model(checkpoints["llama"], device="cuda")


def test_a_tensor_of_many_pieces_is_converted_in_order(tmp_path: Path) -> None:
    num_rows = PIECE_BYTES // 1024 + 3  # of 1 KiB each: one whole piece and a short one
    numbers = torch.arange(num_rows * 256, dtype=torch.float32).view(num_rows, 256)
    save_file({"first": torch.ones(5), "numbers": numbers}, tmp_path / "model.safetensors")
    read = torch.empty_like(numbers, dtype=torch.bfloat16)
    with contextlib.closing(StoredCheckpoint(tmp_path)) as checkpoint:
        checkpoint.read("numbers", read)
    assert torch.equal(read, numbers.to(torch.bfloat16))


def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"numbers": torch.ones(1000)}, path)
    with contextlib.closing(StoredCheckpoint(tmp_path)) as checkpoint:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(ModelLoadError, match=r"numbers .* ends before"):
            checkpoint.read("numbers", torch.empty(1000))
