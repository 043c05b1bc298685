"""Families whose blocks are put together differently: OLMo 2 and 3, EXAONE 4, Cohere 2."""

from __future__ import annotations

from typing import Any

from forkpoint.model.config import LayerSpec, ModelConfig, RopeSpec
from forkpoint.model.families.family import describe, layer, layer_windows, rope


def read_olmo2(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """All layers full; one norm over all heads of q, one over those of k."""
    layers = [_olmo_layer(hf, None, rope(hf, is_wide=True))] * hf.num_hidden_layers
    return describe(family, hf, layers, eos, norm="rms_wide")


def read_olmo3(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """OLMo 2 with sliding layers; a rope for each kind, only that of full layers scaled."""
    layers = [
        _olmo_layer(hf, window, rope(hf, hf.rope_parameters[layer_type], is_wide=True))
        for window, layer_type in zip(layer_windows(hf), hf.layer_types, strict=True)
    ]
    return describe(family, hf, layers, eos, norm="rms_wide")


def _olmo_layer(hf: Any, window: int | None, rope_of_layer: RopeSpec) -> LayerSpec:
    return layer(
        hf,
        window,
        rope_of_layer,
        block="post",
        qk_norm="flat",
        has_qkv_bias=hf.attention_bias,
        has_o_bias=hf.attention_bias,
    )


def read_exaone4(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Full layers have no position embedding, unless all layers are full."""
    is_hybrid = hf.sliding_window is not None
    layers = [
        layer(
            hf,
            window,
            None if is_hybrid and window is None else rope(hf),
            block="post",
            qk_norm="head",
        )
        for window in layer_windows(hf)
    ]
    return describe(family, hf, layers, eos)


def read_cohere2(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Attention and MLP side by side behind one layer norm; full layers have no position embedding."""
    layers = [
        layer(
            hf,
            window,
            None if window is None else rope(hf, is_interleaved=True, is_wide=True),
            block="parallel",
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
        )
        for window in layer_windows(hf)
    ]
    return describe(
        family,
        hf,
        layers,
        eos,
        norm="layer",
        norm_eps=hf.layer_norm_eps,
        logit_multiplier=hf.logit_scale,
    )
