"""Configurations as the hub has them, in older spellings than the installed transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forkpoint.model.config import Llama3Scaling, ModelConfig, load_config
from forkpoint.model.weights import count_parameters

GEMMA3_270M: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _load(directory: Path, content: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(content))
    return load_config(directory)


def test_gemma3_270m(tmp_path: Path) -> None:
    config = _load(tmp_path, GEMMA3_270M)
    assert config.layer_pattern == "SSSSSF" * 3
    assert (config.window, config.is_tied, config.checkpoint_dtype) == (512, True, "bfloat16")
    assert {layer.rope.theta for layer in config.layers if layer.rope and layer.window} == {1e4}
    assert {layer.rope.theta for layer in config.layers if layer.rope and not layer.window} == {1e6}
    assert all(layer.rope and layer.rope.scaling is None for layer in config.layers)
    assert config.layers[0].attention_scale == 1 / 16
    # 3 KiB in full layers and 15 KiB in sliding ones, in bfloat16
    assert config.kv_bytes_per_token("full", torch.bfloat16) == 3 * 1024
    assert config.kv_bytes_per_token("swa", torch.bfloat16) == 15 * 1024
    assert count_parameters(config) == 268_098_176


def test_llama_3_2_1b(tmp_path: Path) -> None:
    config = _load(tmp_path, LLAMA_3_2_1B)
    assert (config.layer_pattern, config.window) == ("F" * 16, None)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.theta == 500000.0
    assert config.layers[0].rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert count_parameters(config) == 1_235_814_400


def test_qwen3_0_6b(tmp_path: Path) -> None:
    config = _load(tmp_path, QWEN3_0_6B)
    assert (config.layer_pattern, config.context_length) == ("F" * 28, 40960)
    assert {layer.qk_norm for layer in config.layers} == {"head"}
    assert count_parameters(config) == 596_049_920


def test_qwen3_with_every_layer_sliding_has_one_kind(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    config = _load(tmp_path, QWEN3_0_6B | changes)
    assert (config.layer_pattern, config.kinds, config.window) == ("S" * 28, ("swa",), 4096)
