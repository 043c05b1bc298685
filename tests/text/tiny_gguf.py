"""Tiny GGUF files, written from transformers models the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

_COMMON: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: Mapping[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(
        **_COMMON,
        num_hidden_layers=3,
        sliding_window=8,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "gemma3": Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=7,
        sliding_window=8,
        query_pre_attn_scalar=32,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama": LlamaConfig(
        **_COMMON,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2": Qwen2Config(
        **_COMMON, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen3": Qwen3Config(
        **_COMMON,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(architecture: str) -> Any:
    """A random model in float32; norms are random too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=torch.float32).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    extra_tensors: Mapping[str, NDArray[np.float32]] | None = None,
    without: str | None = None,
    settings: Mapping[str, float] | None = None,
) -> Path:
    """Write `model` to `path`. extra_tensors, without, settings: what to add to the file or leave out."""
    config = CONFIGS[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    rope = config.rope_parameters
    if architecture == "gemma2":  # as llama.cpp's converter: no theta
        writer.add_sliding_window(8)
        writer.add_attn_logit_softcapping(20.0)
        writer.add_final_logit_softcapping(10.0)
    else:
        writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    for key, value in (settings or {}).items():
        writer.add_float32(f"{architecture}.{key}", value)
    _add_tokenizer(writer, architecture)
    tensors = _tensors(architecture, model) | dict(extra_tensors or {})
    tensors.pop(without or "", None)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, architecture: str) -> None:
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<end_of_turn>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁",
    ]
    kinds = [3, 3, 3, 2, 3, *[6] * 256, 1]
    tokens += [*"abcdefghijklmnopqrstuvwxyz", "▁a", "he", "hel"]
    tokens += [f"<unused{i}>" for i in range(300 - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(300)])
    writer.add_token_types([*kinds, *[1] * (300 - len(kinds))])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    if architecture.startswith("gemma"):
        writer.add_add_space_prefix(False)


def _tensors(architecture: str, model: Any) -> dict[str, NDArray[np.float32]]:
    names = _GEMMA_NAMES if architecture.startswith("gemma") else _NAMES
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and CONFIGS[architecture].tie_word_embeddings:
            continue
        values = parameter.numpy()
        stem, _, leaf = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        target = f"blk.{layer}.{names[part]}" if stem.startswith("model.layers.") else names[stem]
        if architecture.startswith("gemma") and "norm" in target:
            values = values + np.float32(1)
        if architecture == "llama" and target.endswith(("attn_q", "attn_k")):
            num_heads = 4 if target.endswith("attn_q") else 2
            # As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensors[f"{target}.{leaf}"] = np.ascontiguousarray(values)
    if architecture == "llama":
        # What llama.cpp divides each frequency by; transformers has the scaled frequencies.
        plain = 500_000.0 ** -(np.arange(0, 32, 2) / 32)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    return tensors
