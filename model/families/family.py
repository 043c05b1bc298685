"""What a family is, and what the readers of all families share: layers, rope and windows out of a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import (
    Activation,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeSpec,
    YarnScaling,
)

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    read: ModelConfig from the family's name, the transformers config and the end-of-text ids.
    tensor_names: on-disk name of each of our tensors; {i} is the layer, {e} the expert.
    ignored: regular expressions of on-disk names that are left unread.
    """

    read: Callable[[str, Any, tuple[int, ...]], ModelConfig]
    tensor_names: Mapping[str, str]
    ignored: tuple[str, ...] = ()


def describe(
    family: str, hf: Any, layers: Sequence[LayerSpec], eos_token_ids: tuple[int, ...], **different: Any
) -> ModelConfig:
    """The ModelConfig of `layers`, with an RMSNorm as in Llama; `different`: fields that are not so."""
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "layers": tuple(layers),
        "norm": "rms",
        "is_tied": hf.tie_word_embeddings,
        "context_length": hf.max_position_embeddings,
        "eos_token_ids": eos_token_ids,
        "checkpoint_dtype": _dtype_name(hf.dtype),
    }
    if "norm_eps" not in different:
        fields["norm_eps"] = hf.rms_norm_eps
    return ModelConfig(**(fields | different))


def layer(hf: Any, window: int | None, rope_of_layer: RopeSpec | None, **different: Any) -> LayerSpec:
    """A layer as in Llama but for `different`: pre-norm, scores over sqrt(head_dim), no biases."""
    dim = head_dim(hf)
    fields: dict[str, Any] = {
        "window": window,
        "num_q_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "k_dim": dim,
        "v_dim": dim,
        "rope": rope_of_layer,
        "attention_scale": dim**-0.5,
        "mlp_dim": hf.intermediate_size,
    }
    if "activation" not in different:
        fields["activation"] = activation(hf.hidden_act)
    return LayerSpec(**(fields | different))


def head_dim(hf: Any) -> int:
    """Dims of a head of q and k."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def layer_windows(hf: Any) -> list[int | None]:
    """W of each layer by hf.layer_types, None for full attention."""
    return [window(layer_type, hf.sliding_window) for layer_type in hf.layer_types]


def same_window(hf: Any) -> list[int | None]:
    """For families whose layers are all sliding, or all full where sliding_window is null."""
    expected = "full_attention" if hf.sliding_window is None else "sliding_attention"
    named = set(getattr(hf, "layer_types", None) or ())
    if named - {expected}:
        raise ModelLoadError(
            f"layer_types has {', '.join(sorted(named))}, but {hf.model_type} has the same attention in all "
            "layers (transformers ignores layer_types there)"
        )
    return [window(expected, hf.sliding_window)] * hf.num_hidden_layers


def window(layer_type: str, sliding_window: int | None) -> int | None:
    """W of a layer of this type, None for full attention."""
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise ModelLoadError(f"layer type {layer_type!r} is not supported")
    if sliding_window is None or sliding_window < 1:
        raise ModelLoadError(f"sliding_window is {sliding_window}; it must be 1 or more")
    return sliding_window


def activation(name: str) -> Activation:
    """Ours for transformers' name of an activation."""
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope(hf: Any, parameters: Mapping[str, Any] | None = None, **different: Any) -> RopeSpec:
    """The rope of hf.rope_parameters, or of `parameters` where layers differ."""
    if parameters is None:
        parameters = hf.rope_parameters
    rotary_dim = int(head_dim(hf) * parameters.get("partial_rotary_factor", 1.0))
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _SCALINGS:
        raise ModelLoadError(
            f"rope scaling {rope_type!r} is not supported; supported: {', '.join(_SCALINGS)}"
        )
    return RopeSpec(
        theta=float(parameters["rope_theta"]),
        rotary_dim=rotary_dim,
        scaling=_SCALINGS[rope_type](hf, parameters),
        **different,
    )


def _no_scaling(hf: Any, parameters: Mapping[str, Any]) -> None:
    return None


def _linear(hf: Any, parameters: Mapping[str, Any]) -> LinearScaling:
    return LinearScaling(float(parameters["factor"]))


def _llama3(hf: Any, parameters: Mapping[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_context_length=int(parameters["original_max_position_embeddings"]),
    )


def _yarn(hf: Any, parameters: Mapping[str, Any]) -> YarnScaling:
    original = int(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or hf.max_position_embeddings / original)
    return YarnScaling(
        factor=factor,
        original_context_length=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        is_truncated=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(factor, parameters),
    )


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def growth(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)


def _longrope(hf: Any, parameters: Mapping[str, Any]) -> LongRopeScaling:
    original = int(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or hf.max_position_embeddings / original)
    given = parameters.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factors=tuple(float(f) for f in parameters["short_factor"]),
        long_factors=tuple(float(f) for f in parameters["long_factor"]),
        original_context_length=original,
        attention_factor=float(given),
    )


_SCALINGS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "default": _no_scaling,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _dtype_name(dtype: Any) -> str:
    # A config may leave its dtype out; float32 loses nothing whatever the file holds.
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")
