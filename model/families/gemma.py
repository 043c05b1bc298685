"""Gemma 2, Gemma 3 and VaultGemma: norms of `1 + w`, scaled embeddings, softcaps, GeGLU."""

from __future__ import annotations

from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import LayerSpec, ModelConfig
from forkpoint.model.families.family import activation, describe, layer, layer_windows, rope


def read_gemma2(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    return _gemma2(family, hf, eos, block="sandwich")


def read_vaultgemma(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Gemma 2 without the norms after attention and MLP."""
    return _gemma2(family, hf, eos, block="pre")


def read_gemma3(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """A rope for each kind of layer; norms on the heads of q and k."""
    if hf.attn_logit_softcapping is not None:
        raise ModelLoadError(
            "attn_logit_softcapping is set; transformers ignores it for Gemma 3, so its meaning is unclear"
        )
    layers = [
        _layer(hf, window, rope(hf, hf.rope_parameters[layer_type]), block="sandwich", qk_norm="head")
        for window, layer_type in zip(layer_windows(hf), hf.layer_types, strict=True)
    ]
    return _describe(family, hf, eos, layers)


def _gemma2(family: str, hf: Any, eos: tuple[int, ...], *, block: str) -> ModelConfig:
    layers = [
        _layer(hf, window, rope(hf), block=block, softcap=hf.attn_logit_softcapping)
        for window in layer_windows(hf)
    ]
    return _describe(family, hf, eos, layers)


def _layer(hf: Any, *place: Any, **different: Any) -> LayerSpec:
    return layer(
        hf,
        *place,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        activation=activation(hf.hidden_activation),
        has_qkv_bias=hf.attention_bias,
        has_o_bias=hf.attention_bias,
        **different,
    )


def _describe(family: str, hf: Any, eos: tuple[int, ...], layers: list[LayerSpec]) -> ModelConfig:
    if getattr(hf, "use_bidirectional_attention", False):
        raise ModelLoadError("use_bidirectional_attention is set: this is an encoder, not a decoder")
    return describe(
        family,
        hf,
        layers,
        eos,
        norm="rms_plus_one",
        embedding_multiplier=hf.hidden_size**0.5,
        final_softcap=hf.final_logit_softcapping,
    )
