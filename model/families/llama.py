"""Llama and what differs from it in a field or two: Mistral, Qwen, Phi-3, SmolLM3, Granite and others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import ModelConfig, MoeSpec
from forkpoint.model.families.family import describe, layer, layer_windows, rope, same_window

Eos = tuple[int, ...]


def read_llama(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """All layers full."""
    spec = layer(
        hf,
        None,
        rope(hf),
        has_qkv_bias=hf.attention_bias,
        has_o_bias=hf.attention_bias,
        has_mlp_bias=hf.mlp_bias,
    )
    return describe(family, hf, [spec] * hf.num_hidden_layers, eos)


def read_mistral(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Mistral, Phi-3: all layers sliding, or all full."""
    return describe(family, hf, [layer(hf, window, rope(hf)) for window in same_window(hf)], eos)


def read_ministral(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Mistral with a type for each layer."""
    return describe(family, hf, [layer(hf, window, rope(hf)) for window in layer_windows(hf)], eos)


def read_cwm(family: str, hf: Any, eos: Eos) -> ModelConfig:
    layers = [layer(hf, window, rope(hf), has_mlp_bias=hf.mlp_bias) for window in layer_windows(hf)]
    return describe(family, hf, layers, eos)


def read_qwen2(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Full below max_window_layers and sliding from there on, where use_sliding_window is set."""
    layers = [layer(hf, window, rope(hf), has_qkv_bias=True) for window in layer_windows(hf)]
    return describe(family, hf, layers, eos)


def read_qwen3(family: str, hf: Any, eos: Eos) -> ModelConfig:
    layers = [
        layer(
            hf,
            window,
            rope(hf),
            qk_norm="head",
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
        )
        for window in layer_windows(hf)
    ]
    return describe(family, hf, layers, eos)


def read_smollm3(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Some layers have no position embedding; these may be sliding."""
    layers = [
        layer(
            hf,
            window,
            rope(hf) if has_rope else None,
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
            has_mlp_bias=hf.mlp_bias,
        )
        for window, has_rope in zip(layer_windows(hf), hf.no_rope_layers, strict=False)
    ]
    return describe(family, hf, layers, eos)


def read_granite(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Multipliers at embedding, scores, residual and logits."""
    return _granite(family, hf, eos, [None] * hf.num_hidden_layers, has_sinks=False)


def read_granite_swa(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Granite with sinks, sliding layers and a theta for each layer, 0 for no position embedding."""
    config = _granite(family, hf, eos, layer_windows(hf), has_sinks=True)
    layers = tuple(
        replace(spec, rope=replace(rope(hf), theta=float(theta)) if theta else None)
        for spec, theta in zip(config.layers, hf.layer_rope_theta, strict=True)
    )
    return replace(config, layers=layers)


def read_granitemoe_swa(family: str, hf: Any, eos: Eos) -> ModelConfig:
    """Granite SWA with experts; those that all rows share are not read."""
    if hf.shared_intermediate_size:
        raise ModelLoadError(
            f"shared_intermediate_size is {hf.shared_intermediate_size}; experts that all rows share are not "
            "supported"
        )
    moe = MoeSpec(
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_dim=hf.intermediate_size,
        scoring="softmax_of_chosen",
        is_renormalised=False,
    )
    config = read_granite_swa(family, hf, eos)
    return replace(config, layers=tuple(replace(spec, moe=moe) for spec in config.layers))


def _granite(family: str, hf: Any, eos: Eos, windows: list[int | None], *, has_sinks: bool) -> ModelConfig:
    layers = [
        layer(
            hf,
            window,
            rope(hf),
            attention_scale=hf.attention_multiplier,
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
            has_mlp_bias=getattr(hf, "mlp_bias", False),
            has_sinks=has_sinks,
        )
        for window in windows
    ]
    return describe(
        family,
        hf,
        layers,
        eos,
        embedding_multiplier=float(hf.embedding_multiplier),
        residual_multiplier=float(hf.residual_multiplier),
        logit_multiplier=1 / hf.logits_scaling,
    )
