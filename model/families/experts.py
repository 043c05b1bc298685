"""Families with experts: Mixtral, Qwen 3 MoE, Mellum, gpt-oss, MiMo-V2-Flash."""

from __future__ import annotations

from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import ClampedSwiglu, ModelConfig, MoeSpec
from forkpoint.model.families.family import describe, layer, layer_windows, rope, same_window


def read_mixtral(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    moe = MoeSpec(
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_dim=hf.intermediate_size,
        scoring="softmax",
        is_renormalised=True,
    )
    return describe(family, hf, [layer(hf, window, rope(hf), moe=moe) for window in same_window(hf)], eos)


def read_qwen3_moe(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Qwen 3 with experts in some layers. Unlike Qwen 3, all layers slide or none."""
    is_sparse = [
        index not in hf.mlp_only_layers and hf.num_experts > 0 and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    ]
    layers = [
        layer(
            hf,
            window,
            rope(hf),
            qk_norm="head",
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
            moe=_softmax_experts(hf) if sparse else None,
        )
        for window, sparse in zip(same_window(hf), is_sparse, strict=True)
    ]
    return describe(family, hf, layers, eos)


def read_mellum(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Qwen 3 MoE with a type, a rope and a kind of MLP for each layer."""
    layers = [
        layer(
            hf,
            window,
            rope(hf, hf.rope_parameters[layer_type]),
            qk_norm="head",
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
            moe=_softmax_experts(hf) if mlp_type == "sparse" else None,
        )
        for window, layer_type, mlp_type in zip(
            layer_windows(hf), hf.layer_types, hf.mlp_layer_types, strict=True
        )
    ]
    return describe(family, hf, layers, eos)


def read_gpt_oss(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Sinks and biases everywhere; the softmax over the chosen experts only."""
    moe = MoeSpec(
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_dim=hf.intermediate_size,
        scoring="softmax_of_chosen",
        is_renormalised=False,
        has_router_bias=True,
        has_expert_bias=True,
    )
    layers = [
        layer(
            hf,
            window,
            rope(hf),
            activation=ClampedSwiglu(alpha=hf.swiglu_alpha, limit=hf.swiglu_limit),
            has_qkv_bias=hf.attention_bias,
            has_o_bias=hf.attention_bias,
            has_sinks=True,
            moe=moe,
        )
        for window in layer_windows(hf)
    ]
    return describe(family, hf, layers, eos, norm="rms_wide")


def read_mimo_v2_flash(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
    """Sliding layers have sinks and twice the KV heads; values are narrower than keys, and scaled.

    The hub's window of 128 leaves the query out; transformers adds it, so W is 129.
    """
    _check_mimo_pattern(hf)
    moe = MoeSpec(
        num_experts=hf.n_routed_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_dim=hf.moe_intermediate_size,
        scoring="sigmoid",
        is_renormalised=hf.norm_topk_prob,
        weight_scale=hf.routed_scaling_factor,
        has_correction_bias=True,
        num_groups=hf.n_group,
        groups_per_token=hf.topk_group,
    )
    layers = [
        layer(
            hf,
            window,
            rope(hf, {"partial_rotary_factor": 0.334, **hf.rope_parameters[layer_type]}),
            num_kv_heads=hf.num_key_value_heads * (1 if window is None else 2),
            v_dim=hf.v_head_dim,
            has_qkv_bias=hf.attention_bias,
            has_sinks=window is not None,
            value_scale=1.0 if hf.attention_value_scale is None else hf.attention_value_scale,
            moe=moe if mlp_type == "sparse" else None,
        )
        for window, layer_type, mlp_type in zip(
            layer_windows(hf), hf.layer_types, hf.mlp_layer_types, strict=True
        )
    ]
    return describe(family, hf, layers, eos)


def _check_mimo_pattern(hf: Any) -> None:
    # transformers does not read the hub's spelling of these, but takes what the one released model has.
    pattern = getattr(hf, "hybrid_layer_pattern", None)
    if pattern and [bool(is_sliding) for is_sliding in pattern] != [w is not None for w in layer_windows(hf)]:
        raise ModelLoadError("hybrid_layer_pattern differs from layer_types, which transformers goes by")
    num_kv_heads = getattr(hf, "swa_num_key_value_heads", None)
    if num_kv_heads not in (None, 2 * hf.num_key_value_heads):
        raise ModelLoadError(
            f"swa_num_key_value_heads is {num_kv_heads}; only twice the {hf.num_key_value_heads} of full "
            "layers is known"
        )


def _softmax_experts(hf: Any) -> MoeSpec:
    return MoeSpec(
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_dim=hf.moe_intermediate_size,
        scoring="softmax",
        is_renormalised=hf.norm_topk_prob,
    )
