"""config.json of a GGUF file: llama.cpp's metadata keys, under the names and with the values of transformers.

A key that is not read here may change what the model computes, so it is an error that names it, as is a
missing one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError

ARCHITECTURES = ("gemma2", "gemma3", "llama", "qwen2", "qwen3")
# Every sixth layer of Gemma 3 is full; older files do not say so (llama.cpp has it in its code).
GEMMA3_FULL_EVERY = 6
GEMMA3_SLIDING_ROPE_THETA = 10_000.0
# The 27B models scale queries by hidden / heads, all others by head_dim; the file says nothing (as in
# llama.cpp).
GEMMA2_LAYERS_OF_27B = 46
GEMMA3_LAYERS_OF_27B = 62
# Files of Gemma 2 leave it out.
GEMMA2_ROPE_THETA = 10_000.0
# Llama 3.1 to 3.3 stretch their rope by 8 or 32 with these constants; a file has only the resulting factors.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE_FACTORS = (8.0, 32.0)
# Keys that say nothing about what is computed, or repeat what tensors say.
_IRRELEVANT = ("vocab_size", "rope.scaling.finetuned", "attention.causal")


@dataclass(slots=True)
class Metadata:
    """Metadata of one file; remembers which keys were read (that is why it is mutable)."""

    values: Mapping[str, Any]
    _read: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        return str(self.get_global("general.architecture"))

    def get_global(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of an optional key of the architecture (`llama.` and so on is put before)."""
        full_key = f"{self.architecture}.{key}"
        self._read.add(full_key)
        return self.values.get(full_key, default)

    def require(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"the GGUF file has no {self.architecture}.{key}, which its model needs")
        return value

    def refuse_unread(self) -> None:
        """Raise ModelLoadError for every key of the architecture that nothing asked for."""
        for key in _IRRELEVANT:
            self.get(key)
        prefix = f"{self.architecture}."
        unread = sorted(key for key in self.values.keys() - self._read if key.startswith(prefix))
        if unread:
            raise ModelLoadError(
                f"the GGUF file sets {', '.join(unread)}, which Forkpoint does not know",
                hint="serve the original checkpoint (a directory with safetensors) instead",
            )


def build_config(
    metadata: Metadata, *, vocab_size: int, has_output: bool, rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """config.json of the model. vocab_size: rows of the embedding. has_output: lm_head has a tensor of its
    own.

    rope_factors: [head_dim / 2], the file's rope_freqs.weight. Raises ModelLoadError.
    """
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"the GGUF file's architecture is {architecture!r}; known are {', '.join(ARCHITECTURES)}",
            hint="serve the original checkpoint (a directory with safetensors) instead",
        )
    if rope_factors is not None and architecture != "llama":
        raise ModelLoadError(f"rope_freqs.weight is not known for {architecture}")
    num_heads = int(metadata.require("attention.head_count"))
    hidden_size = int(metadata.require("embedding_length"))
    head_dim = int(metadata.get("attention.key_length", hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.get(key, head_dim)) != head_dim:
            raise ModelLoadError(f"{architecture}.{key} is {value}; it must be head_dim, {head_dim}")
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.require("feed_forward_length")),
        "num_hidden_layers": int(metadata.require("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.get("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(metadata.require("context_length")),
        "rms_norm_eps": _shortest(metadata.require("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": not has_output,
        "attention_bias": False,
        "bos_token_id": metadata.get_global("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get_global("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get_global("tokenizer.ggml.padding_token_id"),
        # Weights were quantised from bfloat16 and are served in it by default.
        "dtype": "bfloat16",
    }
    config |= _FAMILIES[architecture](metadata, config, rope_factors)
    metadata.refuse_unread()
    return config


def _gemma2(metadata: Metadata, config: dict[str, Any], _: NDArray[np.float32] | None) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, num_layers == GEMMA2_LAYERS_OF_27B),
        "sliding_window": int(metadata.require("attention.sliding_window")),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ],
        "attn_logit_softcapping": _shortest(metadata.require("attn_logit_softcapping")),
        "final_logit_softcapping": _shortest(metadata.require("final_logit_softcapping")),
        "rope_parameters": _rope(metadata, default_theta=GEMMA2_ROPE_THETA),
    }


def _gemma3(metadata: Metadata, config: dict[str, Any], _: NDArray[np.float32] | None) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    full_every = metadata.get("attention.sliding_window_pattern", GEMMA3_FULL_EVERY)
    if not isinstance(full_every, int):
        raise ModelLoadError(f"gemma3.attention.sliding_window_pattern is {full_every!r}, no number")
    sliding_theta = _shortest(metadata.get("rope.freq_base_swa", GEMMA3_SLIDING_ROPE_THETA))
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, num_layers == GEMMA3_LAYERS_OF_27B),
        "sliding_window": int(metadata.require("attention.sliding_window")),
        "layer_types": [
            "sliding_attention" if (layer + 1) % full_every else "full_attention"
            for layer in range(num_layers)
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
        },
    }


def _query_scalar(config: dict[str, Any], is_27b: bool) -> int:
    heads_share = config["hidden_size"] // config["num_attention_heads"]
    return int(heads_share if is_27b else config["head_dim"])


def _llama(
    metadata: Metadata, config: dict[str, Any], rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    rope = _rope(metadata)
    if rope_factors is not None:
        rope |= _llama3_rope(rope_factors, rope["rope_theta"], config["head_dim"])
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": rope,
    }


def _qwen2(metadata: Metadata, config: dict[str, Any], _: NDArray[np.float32] | None) -> dict[str, Any]:
    return _qwen3(metadata, config, _) | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(metadata: Metadata, config: dict[str, Any], _: NDArray[np.float32] | None) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "rope_parameters": _rope(metadata),
    }


_FAMILIES = {"gemma2": _gemma2, "gemma3": _gemma3, "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3}


def _rope(metadata: Metadata, *, default_theta: float | None = None) -> dict[str, Any]:
    theta = metadata.get("rope.freq_base", default_theta)
    rope = {"rope_type": "default", "rope_theta": _shortest(theta or metadata.require("rope.freq_base"))}
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor")
    if kind == "linear" and factor is not None:
        return rope | {"rope_type": "linear", "factor": _shortest(factor)}
    if kind != "none":
        raise ModelLoadError(f"rope.scaling.type is {kind!r}; known are none and linear")
    return rope


def _llama3_rope(factors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """The `llama3` scaling whose factors the file holds; verified, since the file does not name it."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    for factor in LLAMA3_ROPE_FACTORS:
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    raise ModelLoadError(
        f"rope_freqs.weight is not what Llama 3 has for a factor of 8 or 32 (its largest: {factors.max():g})"
    )


def _shortest(value: Any) -> float:
    """The shortest decimal that is this float32: 1e-06, where Python would print 9.999999974752427e-07."""
    return float(str(np.float32(value)))
