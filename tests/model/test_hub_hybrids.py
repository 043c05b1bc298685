"""Published configurations of the hybrid families and their neighbours: what is read out of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import (
    ClampedSwiglu,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    MoeSpec,
    YarnScaling,
    load_config,
)
from forkpoint.model.families import FAMILIES
from forkpoint.model.load import on_disk_name
from forkpoint.model.weights import count_parameters, tensor_shapes

BF16 = torch.bfloat16

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

OLMO_3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}

COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "attention_bias": False,
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}

MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "head_dim": 64},
}

PHI_3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}

SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}

QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}

EXAONE_4_32B: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}

EXAONE_4_1_2B: dict[str, Any] = EXAONE_4_32B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "layer_types": ["full_attention"] * 30,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_word_embeddings": True,
}

# The hub's weights are FP8, which is refused; this is the same configuration beside plain weights.
MIMO_V2_FLASH: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "eos_token_id": 151645,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7,
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window_size": 128,
    "swa_num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 152576,
}


def _load(directory: Path, content: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(content))
    return load_config(directory)


def test_gpt_oss_20b(tmp_path: Path) -> None:
    config = _load(tmp_path, GPT_OSS_20B)
    first = config.layers[0]
    assert (config.layer_pattern, config.window, config.norm) == ("SF" * 12, 128, "rms_wide")
    assert all(layer.has_sinks and layer.has_qkv_bias and layer.has_o_bias for layer in config.layers)
    assert first.activation == ClampedSwiglu(alpha=1.702, limit=7.0)
    assert first.moe == MoeSpec(
        32, 4, 2880, "softmax_of_chosen", False, has_router_bias=True, has_expert_bias=True
    )
    assert first.rope is not None and isinstance(first.rope.scaling, YarnScaling)
    assert not first.rope.scaling.is_truncated
    assert first.rope.scaling.attention_factor == pytest.approx(1.3466, abs=1e-4)
    # 3 MiB for a window of 128 in all sliding layers
    assert 128 * config.kv_bytes_per_token("swa", BF16) == 3 * 2**20
    assert count_parameters(config) == 20_914_757_184


def test_olmo_3_7b_scales_its_full_layers_only(tmp_path: Path) -> None:
    config = _load(tmp_path, OLMO_3_7B)
    assert (config.layer_pattern, config.window) == ("SSSF" * 8, 4096)
    assert {(layer.block, layer.qk_norm) for layer in config.layers} == {("post", "flat")}
    sliding, full = config.layers[0].rope, config.layers[3].rope
    assert sliding is not None and full is not None
    assert (sliding.theta, sliding.scaling) == (500000.0, None)
    assert full.scaling == YarnScaling(8.0, 8192, 32.0, 1.0, True, 1.2079441541679836)
    assert count_parameters(config) == 7_298_011_136


def test_command_r7b_has_no_positions_in_full_layers(tmp_path: Path) -> None:
    config = _load(tmp_path, COMMAND_R7B)
    assert (config.layer_pattern, config.window, config.is_tied) == ("SSSF" * 8, 4096, True)
    assert (config.norm, config.norm_eps, config.logit_multiplier) == ("layer", 1e-5, 0.25)
    assert {layer.block for layer in config.layers} == {"parallel"}
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 8
    assert config.layers[0].rope is not None and config.layers[0].rope.is_interleaved
    assert count_parameters(config) == 8_028_033_024


def test_mistral_7b_has_sliding_layers_only(tmp_path: Path) -> None:
    config = _load(tmp_path, MISTRAL_7B)
    assert (config.layer_pattern, config.kinds, config.window) == ("S" * 32, ("swa",), 4096)
    assert count_parameters(config) == 7_241_732_096


def test_mistral_small_3_1_has_a_head_of_its_own(tmp_path: Path) -> None:
    config = _load(tmp_path, MISTRAL_SMALL_3_1)
    assert (config.family, config.layer_pattern, config.is_tied) == ("mistral3", "F" * 40, False)
    names = FAMILIES["mistral3"].tensor_names
    assert on_disk_name(names, "lm_head") == "language_model.lm_head.weight"
    assert on_disk_name(names, "layers.7.q") == "language_model.model.layers.7.self_attn.q_proj.weight"
    assert count_parameters(config) == 23_572_403_200


def test_phi_3_mini_stores_fused_tensors(tmp_path: Path) -> None:
    config = _load(tmp_path, PHI_3_MINI_4K)
    assert (config.layer_pattern, config.window) == ("S" * 32, 2047)
    shapes = tensor_shapes(config)
    assert shapes["layers.0.qkv"] == (9216, 3072) and shapes["layers.0.gate_up"] == (16384, 3072)
    assert count_parameters(config) == 3_821_079_552


def test_phi_3_mini_128k_has_long_and_short_factors(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.3] * 48}
    config = _load(tmp_path, PHI_3_MINI_4K | {"max_position_embeddings": 131072, "rope_scaling": rope})
    found = config.layers[0].rope
    assert found is not None and isinstance(found.scaling, LongRopeScaling)
    assert found.scaling.original_context_length == 4096
    assert found.scaling.attention_factor == pytest.approx(1.1902, abs=1e-4)


def test_smollm3_3b(tmp_path: Path) -> None:
    config = _load(tmp_path, SMOLLM3_3B)
    assert (config.layer_pattern, config.is_tied) == ("F" * 36, True)
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 9
    assert count_parameters(config) == 3_075_098_624


def test_qwen2_5_0_5b(tmp_path: Path) -> None:
    config = _load(tmp_path, QWEN2_5_0_5B)
    assert (config.layer_pattern, config.window) == ("F" * 24, None)
    assert {(layer.has_qkv_bias, layer.has_o_bias) for layer in config.layers} == {(True, False)}
    assert count_parameters(config) == 494_032_768


def test_qwen2_5_slides_from_max_window_layers_on(tmp_path: Path) -> None:
    config = _load(tmp_path, QWEN2_5_0_5B | {"use_sliding_window": True})
    assert (config.layer_pattern, config.window) == ("F" * 21 + "SSS", 32768)


def test_qwen3_30b_a3b(tmp_path: Path) -> None:
    config = _load(tmp_path, QWEN3_30B_A3B)
    assert config.layer_pattern == "F" * 48
    assert {layer.moe for layer in config.layers} == {MoeSpec(128, 8, 768, "softmax", True)}
    assert count_parameters(config) == 30_532_122_624


def test_gemma_2_2b(tmp_path: Path) -> None:
    config = _load(tmp_path, GEMMA_2_2B)
    assert (config.layer_pattern, config.window, config.final_softcap) == ("SF" * 13, 4096, 30.0)
    assert {layer.softcap for layer in config.layers} == {50.0}
    assert count_parameters(config) == 2_614_341_888


def test_exaone_4_32b_has_no_positions_in_full_layers(tmp_path: Path) -> None:
    config = _load(tmp_path, EXAONE_4_32B)
    assert (config.layer_pattern, config.window) == ("SSSF" * 16, 4096)
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 16
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.scaling == Llama3Scaling(16.0, 1.0, 4.0, 8192)
    assert count_parameters(config) == 32_003_216_384


def test_exaone_4_1_2b_has_positions_everywhere(tmp_path: Path) -> None:
    config = _load(tmp_path, EXAONE_4_1_2B)
    assert config.layer_pattern == "F" * 30
    assert all(layer.rope is not None for layer in config.layers)
    assert count_parameters(config) == 1_279_391_488


def test_mimo_v2_flash_has_different_kv_in_its_kinds(tmp_path: Path) -> None:
    config = _load(tmp_path, MIMO_V2_FLASH)
    assert config.layer_pattern == "FSSSSF" + "SSSSSF" * 7
    assert config.window == 129
    full, sliding = config.layers[0], config.layers[1]
    assert (full.num_kv_heads, sliding.num_kv_heads) == (4, 8)
    assert (full.k_dim, full.v_dim, sliding.k_dim, sliding.v_dim) == (192, 128, 192, 128)
    assert (full.has_sinks, sliding.has_sinks, sliding.value_scale) == (False, True, 0.707)
    assert full.rope is not None and sliding.rope is not None
    assert (full.rope.theta, sliding.rope.theta) == (5e6, 1e4)
    assert (full.rope.rotary_dim, sliding.rope.rotary_dim) == (64, 64)
    assert full.moe is None and sliding.moe is not None and sliding.moe.scoring == "sigmoid"
    # 2,560 and 5,120 bytes per layer
    assert config.kv_bytes_per_token("full", BF16) == 9 * 4 * 320 * 2
    assert config.kv_bytes_per_token("swa", BF16) == 39 * 8 * 320 * 2
    assert count_parameters(config) == 308_778_780_864


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": [1, 0] * 24}, "hybrid_layer_pattern differs"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4"),
    ],
)
def test_mimo_with_another_layout_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _load(tmp_path, MIMO_V2_FLASH | changes)


def test_rope_scaling_without_a_reader_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ModelLoadError, match="rope scaling 'dynamic' is not supported; supported: default"):
        _load(tmp_path, MISTRAL_7B | {"rope_scaling": scaling})
