"""On-disk names of tensors: one table for most families, and what others have in its place.

`post_attention_layernorm` is the norm before the MLP in Llama, the one after attention in Gemma and OLMo.
"""

from __future__ import annotations

from collections.abc import Mapping

_LAYER = "model.layers.{i}"

COMMON = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm.weight",
    "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm.weight",
    "layers.{i}.q_norm": f"{_LAYER}.self_attn.q_norm.weight",
    "layers.{i}.k_norm": f"{_LAYER}.self_attn.k_norm.weight",
    "layers.{i}.sinks": f"{_LAYER}.self_attn.sinks",
    "layers.{i}.q": f"{_LAYER}.self_attn.q_proj.weight",
    "layers.{i}.k": f"{_LAYER}.self_attn.k_proj.weight",
    "layers.{i}.v": f"{_LAYER}.self_attn.v_proj.weight",
    "layers.{i}.o": f"{_LAYER}.self_attn.o_proj.weight",
    "layers.{i}.q_bias": f"{_LAYER}.self_attn.q_proj.bias",
    "layers.{i}.k_bias": f"{_LAYER}.self_attn.k_proj.bias",
    "layers.{i}.v_bias": f"{_LAYER}.self_attn.v_proj.bias",
    "layers.{i}.o_bias": f"{_LAYER}.self_attn.o_proj.bias",
    "layers.{i}.gate": f"{_LAYER}.mlp.gate_proj.weight",
    "layers.{i}.up": f"{_LAYER}.mlp.up_proj.weight",
    "layers.{i}.down": f"{_LAYER}.mlp.down_proj.weight",
    "layers.{i}.gate_bias": f"{_LAYER}.mlp.gate_proj.bias",
    "layers.{i}.up_bias": f"{_LAYER}.mlp.up_proj.bias",
    "layers.{i}.down_bias": f"{_LAYER}.mlp.down_proj.bias",
}

# Norms after each branch, and none before.
POST_NORM = COMMON | {
    "layers.{i}.attention_output_norm": f"{_LAYER}.post_attention_layernorm.weight",
    "layers.{i}.mlp_output_norm": f"{_LAYER}.post_feedforward_layernorm.weight",
}
SANDWICH = POST_NORM | {"layers.{i}.mlp_norm": f"{_LAYER}.pre_feedforward_layernorm.weight"}

# q, k and v in one tensor, and so are gate and up.
FUSED = COMMON | {
    "layers.{i}.qkv": f"{_LAYER}.self_attn.qkv_proj.weight",
    "layers.{i}.gate_up": f"{_LAYER}.mlp.gate_up_proj.weight",
}

# Every expert has tensors of its own.
EXPERTS = COMMON | {
    "layers.{i}.router": f"{_LAYER}.mlp.gate.weight",
    "layers.{i}.router_correction": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    "layers.{i}.experts.{e}.gate": f"{_LAYER}.mlp.experts.{{e}}.gate_proj.weight",
    "layers.{i}.experts.{e}.up": f"{_LAYER}.mlp.experts.{{e}}.up_proj.weight",
    "layers.{i}.experts.{e}.down": f"{_LAYER}.mlp.experts.{{e}}.down_proj.weight",
}
MIXTRAL = COMMON | {
    "layers.{i}.router": f"{_LAYER}.block_sparse_moe.gate.weight",
    "layers.{i}.experts.{e}.gate": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w1.weight",
    "layers.{i}.experts.{e}.up": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w3.weight",
    "layers.{i}.experts.{e}.down": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w2.weight",
}
# All experts in one tensor [E, out, in].
GRANITE_MOE = COMMON | {
    "layers.{i}.router": f"{_LAYER}.block_sparse_moe.router.weight",
    "layers.{i}.experts_gate_up": f"{_LAYER}.block_sparse_moe.experts.gate_up_proj",
    "layers.{i}.experts_down": f"{_LAYER}.block_sparse_moe.experts.down_proj",
}
# All experts in one tensor [E, in, out]; rows of gate and up take turns. Also stored as MXFP4, under these
# names with `_blocks` and `_scales`.
GPT_OSS = COMMON | {
    "layers.{i}.router": f"{_LAYER}.mlp.router.weight",
    "layers.{i}.router_bias": f"{_LAYER}.mlp.router.bias",
    "layers.{i}.experts_mixed": f"{_LAYER}.mlp.experts.gate_up_proj",
    "layers.{i}.experts_mixed_bias": f"{_LAYER}.mlp.experts.gate_up_proj_bias",
    "layers.{i}.experts_down_transposed": f"{_LAYER}.mlp.experts.down_proj",
    "layers.{i}.experts_down_bias": f"{_LAYER}.mlp.experts.down_proj_bias",
}
MIMO = EXPERTS | {"layers.{i}.sinks": f"{_LAYER}.self_attn.attention_sink_bias"}


def with_prefix(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names of a text model inside a multimodal one."""
    return {name: f"{prefix}{on_disk}" for name, on_disk in names.items()}
