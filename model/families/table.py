"""The table of families, by model_type of config.json. To add one, add a row (docs/models.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import ModelConfig
from forkpoint.model.families import blocks, experts, gemma, llama, names
from forkpoint.model.families.family import Family

# Old Llama checkpoints carry the rope table, which is computed here.
_ROPE_TABLE = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
# Layers that guess several tokens ahead; nothing here drafts.
_MTP = (r"(model\.)?mtp\..*",)
# The parts of a multimodal model that see; only its text part is served.
_VISION = (r"vision_tower\..*", r"multi_modal_projector\..*")

_TEXT_FAMILIES: Mapping[str, Family] = {
    "cohere2": Family(blocks.read_cohere2, names.COMMON),
    "cwm": Family(llama.read_cwm, names.COMMON),
    "exaone4": Family(blocks.read_exaone4, names.POST_NORM),
    "gemma2": Family(gemma.read_gemma2, names.SANDWICH),
    "gemma3_text": Family(gemma.read_gemma3, names.SANDWICH),
    "gpt_oss": Family(experts.read_gpt_oss, names.GPT_OSS),
    "granite": Family(llama.read_granite, names.COMMON),
    "granite_swa": Family(llama.read_granite_swa, names.COMMON),
    "granitemoe_swa": Family(llama.read_granitemoe_swa, names.GRANITE_MOE),
    "llama": Family(llama.read_llama, names.COMMON, ignored=_ROPE_TABLE),
    "mellum": Family(experts.read_mellum, names.EXPERTS, ignored=_MTP),
    "mimo_v2_flash": Family(experts.read_mimo_v2_flash, names.MIMO, ignored=_MTP),
    "ministral": Family(llama.read_ministral, names.COMMON),
    "mistral": Family(llama.read_mistral, names.COMMON, ignored=_ROPE_TABLE),
    "mixtral": Family(experts.read_mixtral, names.MIXTRAL),
    "olmo2": Family(blocks.read_olmo2, names.POST_NORM),
    "olmo3": Family(blocks.read_olmo3, names.POST_NORM),
    "phi3": Family(llama.read_mistral, names.FUSED),
    "qwen2": Family(llama.read_qwen2, names.COMMON),
    "qwen3": Family(llama.read_qwen3, names.COMMON),
    "qwen3_moe": Family(experts.read_qwen3_moe, names.EXPERTS),
    "smollm3": Family(llama.read_smollm3, names.COMMON),
    "vaultgemma": Family(
        gemma.read_vaultgemma,
        names.COMMON | {"layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight"},
    ),
}


def _read_text_part(text_family: str) -> Any:
    """A reader of multimodal configs whose text part is of `text_family`."""

    def read(family: str, hf: Any, eos: tuple[int, ...]) -> ModelConfig:
        found = hf.text_config.model_type
        if found != text_family:
            raise ModelLoadError(
                f"the text part of this {hf.model_type} is a {found!r}; supported there: {text_family}"
            )
        # tie_word_embeddings too is the text part's: the outer one defaults to true, even for Mistral
        # Small 3.1, whose checkpoint has a head of its own.
        return _TEXT_FAMILIES[text_family].read(family, hf.text_config, eos)

    return read


def _text_part_of(text_family: str) -> Family:
    text = _TEXT_FAMILIES[text_family]
    return Family(
        _read_text_part(text_family),
        names.with_prefix("language_model.", text.tensor_names),
        ignored=(*_VISION, *(rf"language_model\.{pattern}" for pattern in text.ignored)),
    )


FAMILIES: Mapping[str, Family] = {
    **_TEXT_FAMILIES,
    "gemma3": _text_part_of("gemma3_text"),
    "mistral3": _text_part_of("mistral"),
}
