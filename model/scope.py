"""What a checkpoint must not be: the reasons why one cannot be served, told before anything slow is done.

A model of an unsupported kind is refused by what it is (a LoRA adapter, an encoder, recurrent layers, weights
of a quantisation without a decoder here), with what to do instead. Imports neither torch nor transformers, so
that the command line can ask before it downloads or starts anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from forkpoint.configs.errors import ModelLoadError

PLAIN_WEIGHTS_HINT = "use the checkpoint with plain bfloat16 or float32 weights"
# Weights of these methods are decoded while they are read, by the families named here.
DECODED_METHODS: Mapping[str, frozenset[str]] = {"mxfp4": frozenset({"gpt_oss"})}

_RECURRENT = (
    "its layers keep a recurrent or convolutional state, which cannot be shared by prefix as attention "
    "state can"
)
_LATENT = "its attention caches compressed latents or indexer keys, for which there is no layer here"
_ENCODER = "it is an encoder, which gives vectors or labels instead of continuing a text"
_ENCODER_DECODER = "it is an encoder-decoder; only decoder-only models are served"
_OTHER_INPUT = "it is made for images, sound or video"

# model_type of config.json, by what stands in the way.
REASONS: Mapping[str, frozenset[str]] = {
    _RECURRENT: frozenset(
        {
            "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2",
            "inkling2_loop", "inkling_mm_model", "inkling_text", "jamba", "kimi_linear", "lara_mini",
            "lfm2", "lfm2_moe", "lfm3", "mamba",
            "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_text",
            "qwen3_next", "qwen4_exp", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
        }
    ),
    _LATENT: frozenset(
        {
            "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "kimi_k25",
            "longcat_flash", "minicpm3", "mistral4", "sarvam_mla",
        }
    ),
    _ENCODER: frozenset(
        {
            "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra",
            "embedding_gemma2", "eurobert", "modernbert", "mpnet", "nomic_bert", "openai_privacy_filter",
            "roberta", "xlm-roberta", "xlm-roberta-xl",
        }
    ),
    _OTHER_INPUT: frozenset(
        {"clip", "dinov2", "siglip", "siglip2", "vit", "wav2vec2", "wav2vec2-bert", "whisper"}
    ),
}  # fmt: skip
# Layer types that have a state of their own, under the names that configurations use.
_RECURRENT_LAYERS = frozenset(
    {"conv", "hybrid", "hybrid_sliding", "linear_attention", "linear", "mamba", "mamba2", "recurrent"}
)
_ENCODER_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
_METHOD_NAMES = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quark": "Quark",
    "auto-round": "AutoRound",
}


def read_raw_config(model_dir: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ModelLoadError, also for what a directory without one may be."""
    path = model_dir / "config.json"
    if not path.is_file():
        _refuse_without_config(model_dir)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw["model_type"], str):
            raise TypeError(f"model_type is {raw['model_type']!r}")
    except (ValueError, KeyError, TypeError, OSError) as exc:
        raise ModelLoadError(f"{path} is not a model configuration: {exc!r}") from exc
    config: dict[str, Any] = raw
    return config


def check_scope(raw: Mapping[str, Any], *, supported: Collection[str]) -> None:
    """Raise ModelLoadError if a model of this config.json cannot be served, with the reason.

    supported: the model types that have a family.
    """
    model_type = str(raw["model_type"])
    if model_type not in supported:
        _refuse_architecture(raw, model_type, supported)
    _refuse_own_code(raw, model_type)
    _refuse_quantised(raw, model_type)


def _refuse_without_config(model_dir: Path) -> None:
    if (adapter := model_dir / "adapter_config.json").is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (ValueError, OSError, AttributeError):
            base = None
        raise ModelLoadError(
            f"{model_dir} is an adapter (LoRA) for {base or 'another model'}; adapters are not served",
            hint="merge it into its model first (peft: merge_and_unload, then save_pretrained)",
        )
    if (model_dir / "model_index.json").is_file():
        raise ModelLoadError(f"{model_dir} is a diffusion pipeline; only language models are served")
    if (model_dir / "params.json").is_file():
        raise ModelLoadError(
            f"{model_dir} is a checkpoint in its maker's own layout (params.json), without config.json",
            hint="use the model's edition for transformers (config.json and safetensors)",
        )
    ggufs = sorted(path.name for path in model_dir.glob("*.gguf"))
    if ggufs:
        raise ModelLoadError(
            f"{model_dir} holds GGUF files and no config.json",
            hint=f"give one of them: {model_dir / ggufs[0]}",
        )
    raise ModelLoadError(f"{model_dir} has no config.json", hint="give a directory in Hugging Face layout")


def _refuse_architecture(raw: Mapping[str, Any], model_type: str, supported: Collection[str]) -> None:
    reason = _reason(raw, model_type)
    if reason is not None:
        raise ModelLoadError(
            f"architecture {model_type!r} is not supported: {reason}", hint=_listed(supported)
        )
    if "auto_map" in raw:
        raise ModelLoadError(
            f"architecture {model_type!r} needs code from its checkpoint (auto_map), which is never run here",
            hint=_listed(supported),
        )
    raise ModelLoadError(f"architecture {model_type!r} is not supported", hint=_listed(supported))


def _reason(raw: Mapping[str, Any], model_type: str) -> str | None:
    for reason, model_types in REASONS.items():
        if model_type in model_types:
            return reason
    if raw.get("is_encoder_decoder"):
        return _ENCODER_DECODER
    text = raw.get("text_config")
    described = {**raw, **text} if isinstance(text, Mapping) else raw
    layer_types = described.get("layer_types") or described.get("layers_block_type") or ()
    if _RECURRENT_LAYERS & {str(layer_type) for layer_type in layer_types}:
        return _RECURRENT
    if any(key.startswith(("mamba_", "ssm_", "linear_conv_", "conv_L_cache")) for key in described):
        return _RECURRENT
    architectures = [str(name) for name in raw.get("architectures") or ()]
    if architectures and all(name.endswith(_ENCODER_HEADS) for name in architectures):
        return _ENCODER
    towers = [key for key in ("vision_config", "audio_config", "video_config") if raw.get(key)]
    if towers:
        return f"it is multimodal ({', '.join(towers)}), and its text part is of no family that is served"
    return None


def _refuse_own_code(raw: Mapping[str, Any], model_type: str) -> None:
    """Code beside a model that transformers knows is a copy of it, unless its class has another name."""
    auto_map = raw.get("auto_map")
    names = [str(name) for name in raw.get("architectures") or ()]
    if not isinstance(auto_map, Mapping) or not names:
        return
    own_class = str(auto_map.get("AutoModelForCausalLM", "")).rpartition(".")[2]
    known = model_type.removesuffix("_text").replace("_", "")
    if names[0] == own_class and not own_class.lower().startswith(known + "for"):
        raise ModelLoadError(
            f"the checkpoint says {model_type!r}, but brings a class of its own ({own_class}, by auto_map); "
            "code from a checkpoint is never run here",
            hint="use the model's edition for transformers, if there is one",
        )


def _refuse_quantised(raw: Mapping[str, Any], model_type: str) -> None:
    text = raw.get("text_config")
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found is None and isinstance(text, Mapping):
        found = text.get("quantization_config")
    if found is None:
        return
    method = str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else "unknown"
    if model_type in DECODED_METHODS.get(method, ()):
        return
    raise ModelLoadError(
        f"the weights are quantised with {_METHOD_NAMES.get(method, method)} (quantization_config says "
        f"{method!r}), which is not supported",
        hint=PLAIN_WEIGHTS_HINT,
    )


def _listed(supported: Collection[str]) -> str:
    return f"supported are {', '.join(sorted(supported))}"
