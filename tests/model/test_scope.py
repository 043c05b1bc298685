"""A checkpoint that cannot be served is refused by what it is, before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.families import FAMILIES
from forkpoint.model.load import load_model
from forkpoint.model.scope import REASONS, check_scope, read_raw_config


def _directory(tmp_path: Path, **files: Any) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def _refusal(raw: dict[str, Any]) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        check_scope(raw, supported=("gemma3_text", "llama", "gpt_oss"))
    return caught.value


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "qwen3_next"}, "recurrent or convolutional state"),
        ({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}, "recurrent or convolutional state"),
        ({"model_type": "lfm2"}, "recurrent or convolutional state"),
        ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]}, "recurrent"),
        ({"model_type": "new", "text_config": {"layer_types": ["conv", "full_attention"]}}, "recurrent"),
        ({"model_type": "new", "mamba_d_state": 16}, "recurrent"),
        ({"model_type": "deepseek_v3"}, "compressed latents"),
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "new", "architectures": ["NewForMaskedLM"]}, "encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, r"multimodal \(vision_config\)"),
        ({"model_type": "whisper"}, "images, sound or video"),
        ({"model_type": "secret", "auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "never run here"),
        ({"model_type": "unheard_of"}, "architecture 'unheard_of' is not supported"),
    ],
)
def test_unsupported_architecture_is_named_with_the_reason(raw: dict[str, Any], reason: str) -> None:
    error = _refusal(raw)
    assert str(raw["model_type"]) in str(error)
    assert reason.replace("\\", "") in str(error)
    assert error.hint == "supported are gemma3_text, gpt_oss, llama"


@pytest.mark.parametrize(
    ("method", "name"),
    [("fp8", "FP8"), ("awq", "AWQ"), ("gptq", "GPTQ"), ("bitsandbytes", "bitsandbytes"),
     ("compressed-tensors", "compressed-tensors"), ("mxfp4", "MXFP4"), ("new-method", "new-method")],
)  # fmt: skip
def test_quantised_weights_are_refused_by_method(method: str, name: str) -> None:
    error = _refusal({"model_type": "llama", "quantization_config": {"quant_method": method}})
    assert f"quantised with {name}" in str(error)
    assert error.hint is not None and "bfloat16" in error.hint
    nested = {"model_type": "llama", "text_config": {"quantization_config": {"quant_method": method}}}
    assert str(_refusal(nested)) == str(error)


def test_mxfp4_experts_of_gpt_oss_are_in_scope() -> None:
    check_scope(
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, supported=("gpt_oss",)
    )


def test_code_in_a_checkpoint_is_passed_over_or_refused_but_never_run(tmp_path: Path) -> None:
    copy = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
    }
    check_scope(copy, supported=("llama",))
    own = copy | {
        "architectures": ["CleverForCausalLM"],
        "auto_map": {"AutoConfig": "code.CleverConfig", "AutoModelForCausalLM": "code.CleverForCausalLM"},
    }
    assert "CleverForCausalLM" in str(_refusal(own))
    trap = tmp_path / "code.py"
    trap.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(ModelLoadError, match="CleverForCausalLM"):
        load_model(_directory(tmp_path, config=own))
    assert not (tmp_path / "executed").exists()


def test_configuration_code_is_not_run_for_a_known_architecture(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    raw = {"model_type": "llama", "vocab_size": 16, "auto_map": {"AutoConfig": "code.LlamaConfig"}}
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_model(_directory(tmp_path, config=raw))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({"adapter_config": {"base_model_name_or_path": "org/base"}}, "adapter (LoRA) for org/base", "merge"),
        ({"model_index": {}}, "diffusion pipeline", None),
        ({"params": {}}, "params.json", "transformers"),
        ({}, "no config.json", "Hugging Face layout"),
    ],
)
def test_directory_without_a_config_is_told_what_it_is(
    tmp_path: Path, files: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_raw_config(_directory(tmp_path, **files))
    assert message in str(caught.value)
    assert caught.value.hint is None if hint is None else hint in str(caught.value.hint)


def test_directory_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(ModelLoadError) as caught:
        read_raw_config(tmp_path)
    assert str(tmp_path / "model-Q4_K_M.gguf") in str(caught.value.hint)


def test_every_reason_names_only_types_that_exist_and_have_no_family() -> None:
    named = set().union(*REASONS.values())
    assert named.isdisjoint(FAMILIES)
    assert named <= set(CONFIG_MAPPING), sorted(named - set(CONFIG_MAPPING))
