"""Configurations of tiny models, one or two for each family, in which every feature of the family is alive.

Head dims are not hidden / heads, windows are far shorter than prompts, kinds of layers differ in all that
they can differ in, and a layer of each kind comes late enough to see what the others made of their windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Cohere2Config,
    CwmConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    VaultGemmaConfig,
)

VOCAB_SIZE = 256
WINDOW = 12

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_BIASED: Mapping[str, Any] = {**_SIZES, "attention_bias": True}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _theta(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _yarn(theta: float, **more: Any) -> dict[str, Any]:
    """beta_fast and beta_slow such that the ramp covers most of a head's dims."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 8.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        **more,
    }


def _pattern(pattern: str) -> dict[str, Any]:
    types = {"S": "sliding_attention", "F": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [types[kind] for kind in pattern],
        "sliding_window": WINDOW,
    }


def gemma3_config() -> PreTrainedConfig:
    """Two thetas, linear scaling on the full layers, a scale that is not head_dim's, softcap."""
    return Gemma3TextConfig(**_gemma3_text(), **{**_BIASED, "eos_token_id": [1, 106]})


def _gemma3_text() -> dict[str, Any]:
    return {
        **_pattern("SSSSSFSF"),
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": _theta(1_000.0),
        },
    }


def gemma3_multimodal_config() -> PreTrainedConfig:
    """A text part beside a vision tower; transformers ignores a softcap of its logits there."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**_BIASED, **_gemma3_text(), **_pattern("SSFS"), "final_logit_softcapping": None}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=255)


def mistral3_config() -> PreTrainedConfig:
    """A Mistral without windows beside a vision tower."""
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**_SIZES, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}
    return Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=255, tie_word_embeddings=False
    )


def gemma2_config() -> PreTrainedConfig:
    """Softcaps at scores and logits, small enough to bend both."""
    return Gemma2Config(
        **_BIASED,
        **_pattern("SFSF"),
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        rope_parameters=_theta(1_000.0),
    )


def vaultgemma_config() -> PreTrainedConfig:
    return VaultGemmaConfig(
        **_BIASED,
        **_pattern("SFS"),
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        rope_parameters=_theta(1_000.0),
    )


def llama_config() -> PreTrainedConfig:
    """All full, llama3 scaling with wavelengths on both sides of its bounds, biases, untied."""
    return LlamaConfig(
        **_BIASED,
        num_hidden_layers=6,
        mlp_bias=True,
        rope_parameters=_llama3_rope(),
    )


def _llama3_rope() -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def cwm_config() -> PreTrainedConfig:
    return CwmConfig(
        **_SIZES,
        **_pattern("FSSFS"),
        mlp_bias=True,
        rope_parameters=_llama3_rope(),
        tie_word_embeddings=False,
    )


def mistral_config() -> PreTrainedConfig:
    """SSSSS: a model without any full layer."""
    return MistralConfig(
        **_SIZES, num_hidden_layers=5, sliding_window=WINDOW, rope_parameters=_theta(1_000.0)
    )


def mistral_full_config() -> PreTrainedConfig:
    """sliding_window null: all full."""
    return MistralConfig(**_SIZES, num_hidden_layers=2, sliding_window=None)


def ministral_config() -> PreTrainedConfig:
    """A type for each layer, the full ones first."""
    return MinistralConfig(**_SIZES, **_pattern("FSSS"), rope_parameters=_theta(1_000.0))


def phi3_config() -> PreTrainedConfig:
    """Fused tensors, half of each head rotated, all sliding. Its head_dim is always hidden / heads."""
    sizes = {**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}
    del sizes["head_dim"]
    return Phi3Config(
        **sizes,
        num_hidden_layers=3,
        sliding_window=WINDOW,
        rope_parameters=_theta(1_000.0, partial_rotary_factor=0.5),
    )


def phi3_longrope_config(*, context_length: int = 512) -> PreTrainedConfig:
    """Other frequencies beyond 64 tokens, and cos and sin scaled by how far that goes."""
    sizes = {**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}
    del sizes["head_dim"]
    sizes["max_position_embeddings"] = context_length
    return Phi3Config(
        **sizes,
        num_hidden_layers=2,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1_000.0,
            "short_factor": [1.0 + 0.05 * pair for pair in range(16)],
            "long_factor": [1.5 + 0.3 * pair for pair in range(16)],
            "original_max_position_embeddings": 64,
        },
    )


def qwen2_config() -> PreTrainedConfig:
    """FFSS: sliding from max_window_layers on; biases of q, k and v only."""
    return Qwen2Config(
        **_SIZES,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        rope_parameters=_theta(1_000.0),
    )


def qwen3_config() -> PreTrainedConfig:
    """All full, norms on the heads of q and k, tied."""
    return Qwen3Config(**_BIASED, num_hidden_layers=6, tie_word_embeddings=True)


def qwen3_sliding_config() -> PreTrainedConfig:
    """FFFSSS: a sliding layer is last, so what only the last layer needs is windowed."""
    return _qwen3_with_windows(max_window_layers=3)


def qwen3_all_sliding_config() -> PreTrainedConfig:
    """SSSSSS: a model without any full layer."""
    return _qwen3_with_windows(max_window_layers=0)


def _qwen3_with_windows(*, max_window_layers: int) -> PreTrainedConfig:
    return Qwen3Config(
        **_BIASED,
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=max_window_layers,
    )


def qwen3_moe_config() -> PreTrainedConfig:
    """Experts in every second layer but one; weights of the chosen as they are."""
    return Qwen3MoeConfig(
        **_BIASED,
        **_EXPERTS,
        num_hidden_layers=4,
        num_experts=8,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    )


def mellum_config() -> PreTrainedConfig:
    return MellumConfig(
        **_BIASED,
        **_EXPERTS,
        **_pattern("SFSF"),
        num_experts=8,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=True,
        rope_parameters={
            "full_attention": _yarn(50_000.0),
            "sliding_attention": _theta(1_000.0),
        },
    )


def mixtral_config() -> PreTrainedConfig:
    """All sliding, experts everywhere."""
    return MixtralConfig(
        **_SIZES,
        num_hidden_layers=3,
        sliding_window=WINDOW,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters=_theta(1_000.0),
    )


def smollm3_config() -> PreTrainedConfig:
    """No rope on every second layer, and these slide."""
    return SmolLM3Config(
        **_BIASED,
        num_hidden_layers=4,
        mlp_bias=True,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        rope_parameters=_theta(1_000.0),
    )


def granite_config() -> PreTrainedConfig:
    return GraniteConfig(**_BIASED, **_MULTIPLIERS, num_hidden_layers=3, mlp_bias=True)


_MULTIPLIERS: Mapping[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.7,
}


def granite_swa_config() -> PreTrainedConfig:
    """A theta for each layer, one of them none; sinks; full layer first."""
    return GraniteSWAConfig(
        **_BIASED, **_MULTIPLIERS, **_pattern("FSSF"), mlp_bias=True, layer_rope_theta=[1e3, 1e4, 500.0, 0]
    )


def granitemoe_swa_config() -> PreTrainedConfig:
    return GraniteMoeSWAConfig(
        **_BIASED,
        **_MULTIPLIERS,
        **_pattern("FSSF"),
        num_local_experts=8,
        num_experts_per_tok=2,
        layer_rope_theta=[1e3, 1e4, 500.0, 0],
    )


def gpt_oss_config() -> PreTrainedConfig:
    """Sinks, biases everywhere, yarn without truncation, a limit that clamps."""
    return GptOssConfig(
        **_BIASED,
        **_pattern("SFSFS"),
        num_local_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=1.5,
        rope_parameters=_yarn(1_000.0, truncate=False),
    )


def olmo2_config() -> PreTrainedConfig:
    return Olmo2Config(**_olmo_sizes(), num_hidden_layers=3, rope_parameters=_theta(1_000.0))


def olmo3_config() -> PreTrainedConfig:
    """Yarn on the full layers only."""
    return Olmo3Config(
        **_olmo_sizes(),
        **_pattern("SSFSF"),
        rope_parameters={"full_attention": _yarn(1_000.0), "sliding_attention": _theta(1_000.0)},
    )


def _olmo_sizes() -> dict[str, Any]:
    """Both have head_dim = hidden / heads, and no field for it."""
    sizes = {**_BIASED, "num_attention_heads": 4}
    del sizes["head_dim"]
    return sizes


def cohere2_config() -> PreTrainedConfig:
    """No rope on the full layers. Its head_dim is always hidden / heads."""
    return Cohere2Config(
        **_olmo_sizes(), **_pattern("SSFSF"), logit_scale=0.3, rope_parameters=_theta(1_000.0)
    )


def exaone4_config() -> PreTrainedConfig:
    """No rope on the full layers."""
    return Exaone4Config(**_SIZES, **_pattern("SSFSF"), rope_parameters=_theta(1_000.0))


def exaone4_full_config() -> PreTrainedConfig:
    """As the 1.2B: all full, and rope on all of them."""
    types = ["full_attention"] * 2
    return Exaone4Config(**_SIZES, num_hidden_layers=2, sliding_window=None, layer_types=types)


def mimo_v2_flash_config() -> PreTrainedConfig:
    """KV heads 2 and 4, keys of 24 and values of 16, dense layer first, grouped experts with correction.

    The window is what the hub's spelling gives: one more than the number there.
    """
    sizes = {**_SIZES, "head_dim": 24, "num_attention_heads": 8}
    # As the hub spells it.
    pattern = _pattern("FSSFSS") | {"sliding_window_size": WINDOW - 1}
    return MiMoV2FlashConfig(
        **sizes,
        **_EXPERTS,
        **pattern,
        v_head_dim=16,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
        rope_parameters={
            "full_attention": _theta(50_000.0, partial_rotary_factor=0.334),
            "sliding_attention": _theta(1_000.0, partial_rotary_factor=0.5),
        },
    )


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "cohere2": cohere2_config,
    "cwm": cwm_config,
    "exaone4": exaone4_config,
    "exaone4_full": exaone4_full_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "gemma3_multimodal": gemma3_multimodal_config,
    "gpt_oss": gpt_oss_config,
    "granite": granite_config,
    "granite_swa": granite_swa_config,
    "granitemoe_swa": granitemoe_swa_config,
    "llama": llama_config,
    "mellum": mellum_config,
    "mimo_v2_flash": mimo_v2_flash_config,
    "ministral": ministral_config,
    "mistral": mistral_config,
    "mistral3": mistral3_config,
    "mistral_full": mistral_full_config,
    "mixtral": mixtral_config,
    "olmo2": olmo2_config,
    "olmo3": olmo3_config,
    "phi3": phi3_config,
    "phi3_longrope": phi3_longrope_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
    "qwen3_all_sliding": qwen3_all_sliding_config,
    "qwen3_moe": qwen3_moe_config,
    "qwen3_sliding": qwen3_sliding_config,
    "smollm3": smollm3_config,
    "vaultgemma": vaultgemma_config,
}
