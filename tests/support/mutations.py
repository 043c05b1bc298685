"""Wrong readings of a configuration, one for each field that is alive in it: each must move the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from forkpoint.model.config import (
    ClampedSwiglu,
    LayerSpec,
    Llama3Scaling,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    YarnScaling,
)
from forkpoint.model.families import FAMILIES
from forkpoint.model.layer_maker import FloatLayers
from forkpoint.model.load import Model, on_disk_name
from forkpoint.model.weights import build_weights, is_float32


@dataclass(frozen=True)
class Mutation:
    """swapped: tensors that are read in each other's place, by the last part of our names."""

    name: str
    config: ModelConfig
    swapped: Mapping[str, str] = field(default_factory=dict)


def mutations(config: ModelConfig) -> Iterator[Mutation]:
    """All wrong readings of `config` that must be seen."""
    yield from _of_model(config)
    for name, wrong in _LAYER_MUTATIONS.items():
        changed = _changed(config, wrong)
        if changed is not None:
            yield Mutation(name, changed)
    for index, rope in enumerate(dict.fromkeys(spec.rope for spec in config.layers if spec.rope)):
        for name, wrong_rope in _of_rope(rope):
            yield Mutation(f"{name} of rope {index}", _with_rope(config, rope, wrong_rope))
    blocks = {spec.block for spec in config.layers}
    if blocks & {"pre", "sandwich"}:
        yield _swap("norms before", config, "attention_norm", "mlp_norm")
    if blocks & {"post", "sandwich"}:
        yield _swap("norms after", config, "attention_output_norm", "mlp_output_norm")
    if "sandwich" in blocks:
        yield _swap("norms between", config, "attention_output_norm", "mlp_norm")
    if "head" in {spec.qk_norm for spec in config.layers}:
        yield _swap("norms of q and k", config, "q_norm", "k_norm")


def mutated_model(model: Model, model_dir: Path, mutation: Mutation) -> Model:
    """`model` as the wrong reading would have loaded it, from the same tensors."""
    stored: dict[str, torch.Tensor] = load_file(model_dir / "model.safetensors")
    names = FAMILIES[model.config.family].tensor_names

    def read(*wanted: str) -> torch.Tensor:
        return torch.cat([read_one(name) for name in wanted])

    def read_one(name: str) -> torch.Tensor:
        place, _, leaf = name.rpartition(".")
        if leaf in mutation.swapped:
            name = f"{place}.{mutation.swapped[leaf]}"
        dtype = torch.float32 if is_float32(name) else model.dtype
        return stored[on_disk_name(names, name)].to(dtype)

    return replace(model, config=mutation.config, weights=build_weights(mutation.config, read, FloatLayers()))


def _of_model(config: ModelConfig) -> Iterator[Mutation]:
    if config.embedding_multiplier != 1.0:
        yield Mutation("embedding multiplier", replace(config, embedding_multiplier=1.0))
    if config.residual_multiplier != 1.0:
        yield Mutation("residual multiplier", replace(config, residual_multiplier=1.0))
    if config.logit_multiplier != 1.0:
        yield Mutation("logit multiplier", replace(config, logit_multiplier=1.0))
    if config.final_softcap is not None:
        yield Mutation("final softcap", replace(config, final_softcap=None))
    if config.norm == "layer":
        yield Mutation("norm without mean", replace(config, norm="rms"))
    if config.norm == "rms_plus_one":
        yield Mutation("norm without the one", replace(config, norm="rms"))
    yield Mutation("epsilon of norms", replace(config, norm_eps=config.norm_eps + 0.01))


def _swap(name: str, config: ModelConfig, a: str, b: str) -> Mutation:
    return Mutation(f"{name} swapped", config, {a: b, b: a})


# Each gives the wrong layer, or None where the field is not alive.
_LAYER_MUTATIONS: Mapping[str, Callable[[LayerSpec], LayerSpec | None]] = {
    "window one less": lambda s: replace(s, window=s.window - 1) if s.window else None,
    "window one more": lambda s: replace(s, window=s.window + 1) if s.window else None,
    "no window": lambda s: replace(s, window=400) if s.window else None,
    "window on full layers": lambda s: None if s.window else replace(s, window=12),
    "attention scale": lambda s: replace(s, attention_scale=s.attention_scale * 1.05),
    "softcap": lambda s: replace(s, softcap=None) if s.softcap else None,
    "no sinks on full layers": lambda s: (
        replace(s, has_sinks=False) if s.has_sinks and not s.window else None
    ),
    "no sinks on sliding layers": lambda s: replace(s, has_sinks=False) if s.has_sinks and s.window else None,
    "value scale": lambda s: replace(s, value_scale=1.0) if s.value_scale != 1.0 else None,
    "no norm of q and k": lambda s: replace(s, qk_norm="none") if s.qk_norm != "none" else None,
    "biases of q, k and v": lambda s: replace(s, has_qkv_bias=False) if s.has_qkv_bias else None,
    "bias of o": lambda s: replace(s, has_o_bias=False) if s.has_o_bias else None,
    "biases of the MLP": lambda s: replace(s, has_mlp_bias=False) if s.has_mlp_bias else None,
    "activation": lambda s: replace(s, activation=_wrong_activation(s)),
    "rope on layers without": lambda s: replace(s, rope=RopeSpec(1_000.0, s.k_dim)) if not s.rope else None,
    "no rope on sliding layers": lambda s: replace(s, rope=None) if s.rope and s.window else None,
    "no rope on full layers": lambda s: replace(s, rope=None) if s.rope and not s.window else None,
    "one expert less": lambda s: _moe(s, lambda m: replace(m, experts_per_token=m.experts_per_token - 1)),
    "one expert more": lambda s: _moe(s, lambda m: replace(m, experts_per_token=m.experts_per_token + 1)),
    "renormalisation": lambda s: _moe(s, _wrong_renormalisation),
    "scoring": lambda s: _moe(s, _wrong_scoring),
    "expert weight scale": lambda s: _moe(
        s, lambda m: replace(m, weight_scale=1.0) if m.weight_scale != 1.0 else None
    ),
    "router bias": lambda s: _moe(
        s, lambda m: replace(m, has_router_bias=False) if m.has_router_bias else None
    ),
    "correction bias": lambda s: _moe(
        s, lambda m: replace(m, has_correction_bias=False) if m.has_correction_bias else None
    ),
    "expert biases": lambda s: _moe(
        s, lambda m: replace(m, has_expert_bias=False) if m.has_expert_bias else None
    ),
    "expert groups": lambda s: _moe(s, lambda m: replace(m, num_groups=1) if m.num_groups > 1 else None),
}


def _changed(config: ModelConfig, wrong: Callable[[LayerSpec], LayerSpec | None]) -> ModelConfig | None:
    """Every layer changed that can be; None if none can."""
    changed = [wrong(spec) for spec in config.layers]
    if not any(changed):
        return None
    return replace(config, layers=tuple(new or old for new, old in zip(changed, config.layers, strict=True)))


def _moe(spec: LayerSpec, wrong: Callable[[MoeSpec], MoeSpec | None]) -> LayerSpec | None:
    changed = None if spec.moe is None else wrong(spec.moe)
    return None if changed is None else replace(spec, moe=changed)


def _wrong_renormalisation(moe: MoeSpec) -> MoeSpec | None:
    # The softmax over the chosen experts sums to one already.
    if moe.scoring == "softmax_of_chosen":
        return None
    return replace(moe, is_renormalised=not moe.is_renormalised)


def _wrong_scoring(moe: MoeSpec) -> MoeSpec:
    # A softmax over all that is renormalised is the softmax over the chosen.
    return replace(moe, scoring="softmax" if moe.scoring == "sigmoid" else "sigmoid")


def _wrong_activation(spec: LayerSpec) -> Any:
    if isinstance(spec.activation, ClampedSwiglu):
        return replace(spec.activation, limit=spec.activation.limit * 2)
    return "silu" if spec.activation == "gelu_tanh" else "gelu_tanh"


def _of_rope(rope: RopeSpec) -> Iterator[tuple[str, RopeSpec]]:
    yield "theta", replace(rope, theta=rope.theta * 1.5)
    yield "pairing", replace(rope, is_interleaved=not rope.is_interleaved)
    yield "rotated dims", replace(rope, rotary_dim=rope.rotary_dim - 2, scaling=None)
    if rope.scaling is not None:
        yield "scaling", replace(rope, scaling=None)
    if isinstance(rope.scaling, YarnScaling):
        turned = replace(rope.scaling, is_truncated=not rope.scaling.is_truncated)
        yield "truncation", replace(rope, scaling=turned)
        yield "attention factor", replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    if isinstance(rope.scaling, Llama3Scaling):
        yield "low bound", replace(rope, scaling=replace(rope.scaling, low_freq_factor=2.0))


def _with_rope(config: ModelConfig, right: RopeSpec, wrong: RopeSpec) -> ModelConfig:
    layers = tuple(replace(spec, rope=wrong) if spec.rope == right else spec for spec in config.layers)
    return replace(config, layers=layers)
