"""The model families: how config.json becomes a ModelConfig, and what the tensors are called on disk.

This is the only place that knows a model by name. To add a family, add a row to FAMILIES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import (
    Activation,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeSpec,
)
from forkpoint.model.scope import check_scope, read_raw_config

_COMMON_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.down_bias": "model.layers.{i}.mlp.down_proj.bias",
}

# `post_attention_layernorm` is the norm before the MLP in Llama, the one after attention in Gemma.
_GEMMA_NAMES = _COMMON_NAMES | {
    "layers.{i}.attention_output_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}

# Old Llama checkpoints carry the rope table, which is computed here.
_LLAMA_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    read: ModelConfig from the transformers config and the end-of-text ids.
    tensor_names: on-disk name of each of our tensors; {i} is the layer.
    ignored: regular expressions of on-disk names that are left unread.
    """

    read: Callable[[Any, tuple[int, ...]], ModelConfig]
    tensor_names: Mapping[str, str]
    ignored: tuple[str, ...] = ()


def read_config(model_dir: Path) -> ModelConfig:
    """Read the configuration of a checkpoint. Raises ModelLoadError."""
    raw = read_raw_config(model_dir)
    check_scope(raw, supported=FAMILIES)
    model_type = raw["model_type"]
    # Imported here: it takes seconds, and only the process that loads a model should pay.
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        return FAMILIES[model_type].read(hf_config, _eos_token_ids(hf_config, model_dir))
    except ModelLoadError:
        raise
    except Exception as exc:  # transformers raises its own zoo of validation errors
        raise ModelLoadError(f"{model_dir / 'config.json'} cannot be read: {exc}") from exc


def _eos_token_ids(hf_config: Any, model_dir: Path) -> tuple[int, ...]:
    """Ids of both files: some checkpoints name the end of a turn in generation_config.json only."""
    found: set[int] = set()
    sources = [hf_config.eos_token_id]
    generation_path = model_dir / "generation_config.json"
    if generation_path.is_file():
        sources.append(json.loads(generation_path.read_text(encoding="utf-8")).get("eos_token_id"))
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
    return tuple(sorted(found))


def _read_gemma3(hf: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    if hf.use_bidirectional_attention:
        raise ModelLoadError("use_bidirectional_attention is set: this is an encoder, not a decoder")
    if hf.attn_logit_softcapping is not None:
        raise ModelLoadError(
            "attn_logit_softcapping is set; transformers ignores it for Gemma 3, so its meaning is unclear"
        )
    layers = tuple(
        LayerSpec(
            window=_window(layer_type, hf.sliding_window),
            num_q_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            k_dim=hf.head_dim,
            v_dim=hf.head_dim,
            rope=_rope(hf.rope_parameters[layer_type], hf.head_dim),
            attention_scale=hf.query_pre_attn_scalar**-0.5,
            mlp_dim=hf.intermediate_size,
            qk_norm="head",
            block="sandwich",
            activation=_activation(hf.hidden_activation),
            has_attention_bias=hf.attention_bias,
        )
        for layer_type in hf.layer_types
    )
    return ModelConfig(
        family="gemma3_text",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        layers=layers,
        norm="rms_plus_one",
        norm_eps=hf.rms_norm_eps,
        is_tied=hf.tie_word_embeddings,
        context_length=hf.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        checkpoint_dtype=_dtype_name(hf.dtype),
        embedding_multiplier=hf.hidden_size**0.5,
        final_softcap=hf.final_logit_softcapping,
    )


def _read_llama(hf: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    layer = LayerSpec(
        window=None,
        num_q_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        k_dim=hf.head_dim,
        v_dim=hf.head_dim,
        rope=_rope(hf.rope_parameters, hf.head_dim),
        attention_scale=hf.head_dim**-0.5,
        mlp_dim=hf.intermediate_size,
        activation=_activation(hf.hidden_act),
        has_attention_bias=hf.attention_bias,
        has_mlp_bias=hf.mlp_bias,
    )
    return _plain_config("llama", hf, (layer,) * hf.num_hidden_layers, eos_token_ids)


def _read_qwen3(hf: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    layers = tuple(
        LayerSpec(
            window=_window(layer_type, hf.sliding_window),
            num_q_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            k_dim=hf.head_dim,
            v_dim=hf.head_dim,
            rope=_rope(hf.rope_parameters, hf.head_dim),
            attention_scale=hf.head_dim**-0.5,
            mlp_dim=hf.intermediate_size,
            qk_norm="head",
            activation=_activation(hf.hidden_act),
            has_attention_bias=hf.attention_bias,
        )
        for layer_type in hf.layer_types
    )
    return _plain_config("qwen3", hf, layers, eos_token_ids)


def _plain_config(
    family: str, hf: Any, layers: tuple[LayerSpec, ...], eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        layers=layers,
        norm="rms",
        norm_eps=hf.rms_norm_eps,
        is_tied=hf.tie_word_embeddings,
        context_length=hf.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        checkpoint_dtype=_dtype_name(hf.dtype),
    )


def _window(layer_type: str, sliding_window: int | None) -> int | None:
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise ModelLoadError(f"layer type {layer_type!r} is not supported")
    if sliding_window is None or sliding_window < 1:
        raise ModelLoadError(f"sliding_window is {sliding_window}; it must be 1 or more")
    return sliding_window


def _rope(parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    theta = float(parameters["rope_theta"])
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        return RopeSpec(theta, rotary_dim)
    if rope_type == "linear":
        return RopeSpec(theta, rotary_dim, LinearScaling(float(parameters["factor"])))
    if rope_type == "llama3":
        return RopeSpec(
            theta,
            rotary_dim,
            Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_context_length=int(parameters["original_max_position_embeddings"]),
            ),
        )
    raise ModelLoadError(f"rope scaling {rope_type!r} is not supported; supported: default, linear, llama3")


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype_name(dtype: Any) -> str:
    # A config may leave its dtype out; float32 loses nothing whatever the file holds.
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family(_read_gemma3, _GEMMA_NAMES),
    "llama": Family(_read_llama, _COMMON_NAMES, _LLAMA_IGNORED),
    "qwen3": Family(_read_qwen3, _COMMON_NAMES),
}
