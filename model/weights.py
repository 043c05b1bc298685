"""The weights of a decoder, ready to run, and the names and shapes of the tensors they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from forkpoint.model.config import LayerSpec, ModelConfig, MoeSpec
from forkpoint.model.families import FAMILIES
from forkpoint.model.layer_maker import Embedding, LayerMaker
from forkpoint.model.linear import GatedMlp, Linear
from forkpoint.model.moe import MoeMlp, Router
from forkpoint.model.norm import FlatQkNorm, NormLayer, make_norm

Shape = tuple[int, ...]


class ReadTensor(Protocol):
    """Gives tensors by our names, joined along the first dimension, in the right dtype, on the device."""

    def __call__(self, *names: str) -> torch.Tensor: ...


# Read as float32 whatever the model's dtype is: tiny, and what they decide does not average out.
_FLOAT32 = ("router", "router_bias", "router_correction", "sinks")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv gives q's, k's and v's heads in a row; qk_norm takes q's and k's, [T, Hq + Hkv, k_dim].

    Norms are None where the block has none. sinks: [Hq] float32.
    """

    attention_norm: NormLayer | None
    qkv: Linear
    qk_norm: NormLayer | None
    sinks: torch.Tensor | None
    o: Linear
    attention_output_norm: NormLayer | None
    mlp_norm: NormLayer | None
    mlp: GatedMlp
    mlp_output_norm: NormLayer | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a decoder."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: NormLayer
    lm_head: Linear


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of `config` must hold, by our names (layers.3.q, ...).

    Where a family stores several of our tensors as one (qkv), its table names that one.
    """
    stored = FAMILIES[config.family].tensor_names
    shapes: dict[str, Shape] = {
        "embedding": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.is_tied:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    for index, layer in enumerate(config.layers):
        for name, shape in _layer_shapes(layer, config.hidden_size, stored).items():
            shapes[f"layers.{index}.{name}"] = shape
    return shapes


def is_float32(name: str) -> bool:
    """Whether a tensor (by our name) is read as float32, whatever the model's dtype."""
    return name.rpartition(".")[2] in _FLOAT32


def num_inputs(name: str, shape: Shape) -> int | None:
    """Inputs of the matrix (of each expert's) that tensor `name` is; None if it is no matrix of a layer."""
    leaf = name.rpartition(".")[2]
    if len(shape) < 2 or is_float32(name) or leaf.endswith(("_norm", "_bias")):
        return None
    return shape[-2] if leaf in ("experts_mixed", "experts_down_transposed") else shape[-1]


def count_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def build_weights(config: ModelConfig, read: ReadTensor, maker: LayerMaker) -> ModelWeights:
    """Assemble the weights.

    Reads layer by layer; where weights are packed or quantised that happens at once, so that only one layer
    is held twice.
    """
    embedding = maker.embedding(read("embedding"))
    stored = FAMILIES[config.family].tensor_names
    layers = tuple(
        _build_layer(config, layer, stored, _of_layer(read, index), maker)
        for index, layer in enumerate(config.layers)
    )
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=make_norm(config.norm, read("final_norm"), config.norm_eps),
        lm_head=embedding.tied_head() if config.is_tied else maker.linear(read("lm_head"), None),
    )


def _of_layer(read: ReadTensor, index: int) -> ReadTensor:
    return lambda *names: read(*(f"layers.{index}.{name}" for name in names))


# Norms before and after a branch, by block.
_NORMS: Mapping[str, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_output_norm", "mlp_output_norm"),
    "sandwich": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
    "parallel": ("attention_norm",),
}


def _is_stored(stored: Mapping[str, str], name: str) -> bool:
    return f"layers.{{i}}.{name}" in stored


def _layer_shapes(layer: LayerSpec, hidden: int, stored: Mapping[str, str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {name: (hidden,) for name in _NORMS[layer.block]}
    return shapes | _attention_shapes(layer, hidden, stored) | _mlp_shapes(layer, hidden, stored)


def _attention_shapes(layer: LayerSpec, hidden: int, stored: Mapping[str, str]) -> dict[str, Shape]:
    q_dim = layer.num_q_heads * layer.k_dim
    k_dim = layer.num_kv_heads * layer.k_dim
    v_dim = layer.num_kv_heads * layer.v_dim
    parts = {"q": q_dim, "k": k_dim, "v": v_dim}
    if _is_stored(stored, "qkv"):
        parts = {"qkv": q_dim + k_dim + v_dim}
    shapes: dict[str, Shape] = {name: (rows, hidden) for name, rows in parts.items()}
    shapes["o"] = (hidden, layer.num_q_heads * layer.v_dim)
    if layer.has_qkv_bias:
        shapes |= {f"{name}_bias": (rows,) for name, rows in parts.items()}
    if layer.has_o_bias:
        shapes["o_bias"] = (hidden,)
    if layer.qk_norm == "head":
        shapes |= {"q_norm": (layer.k_dim,), "k_norm": (layer.k_dim,)}
    if layer.qk_norm == "flat":
        shapes |= {"q_norm": (q_dim,), "k_norm": (k_dim,)}
    if layer.has_sinks:
        shapes["sinks"] = (layer.num_q_heads,)
    return shapes


def _mlp_shapes(layer: LayerSpec, hidden: int, stored: Mapping[str, str]) -> dict[str, Shape]:
    if layer.moe is not None:
        return _moe_shapes(layer.moe, hidden, stored)
    parts = {"gate": layer.mlp_dim, "up": layer.mlp_dim}
    if _is_stored(stored, "gate_up"):
        parts = {"gate_up": 2 * layer.mlp_dim}
    shapes: dict[str, Shape] = {name: (rows, hidden) for name, rows in parts.items()}
    shapes["down"] = (hidden, layer.mlp_dim)
    if layer.has_mlp_bias:
        shapes |= {f"{name}_bias": (rows,) for name, rows in parts.items()} | {"down_bias": (hidden,)}
    return shapes


def _moe_shapes(moe: MoeSpec, hidden: int, stored: Mapping[str, str]) -> dict[str, Shape]:
    num, dim = moe.num_experts, moe.expert_dim
    shapes: dict[str, Shape] = {"router": (num, hidden)}
    if moe.has_router_bias:
        shapes["router_bias"] = (num,)
    if moe.has_correction_bias:
        shapes["router_correction"] = (num,)
    if _is_stored(stored, "experts.{e}.gate"):
        for expert in range(num):
            shapes |= {
                f"experts.{expert}.gate": (dim, hidden),
                f"experts.{expert}.up": (dim, hidden),
                f"experts.{expert}.down": (hidden, dim),
            }
    elif _is_stored(stored, "experts_gate_up"):
        shapes |= {"experts_gate_up": (num, 2 * dim, hidden), "experts_down": (num, hidden, dim)}
    else:
        shapes |= {"experts_mixed": (num, hidden, 2 * dim), "experts_down_transposed": (num, dim, hidden)}
    if moe.has_expert_bias:
        shapes |= {"experts_mixed_bias": (num, 2 * dim), "experts_down_bias": (num, hidden)}
    return shapes


def _build_layer(
    config: ModelConfig, layer: LayerSpec, stored: Mapping[str, str], read: ReadTensor, maker: LayerMaker
) -> LayerWeights:
    norms = {name: make_norm(config.norm, read(name), config.norm_eps) for name in _NORMS[layer.block]}
    return LayerWeights(
        attention_norm=norms.get("attention_norm"),
        qkv=maker.linear(
            read("qkv") if _is_stored(stored, "qkv") else read("q", "k", "v"),
            _qkv_bias(stored, read) if layer.has_qkv_bias else None,
        ),
        qk_norm=_qk_norm(config, layer, read),
        sinks=read("sinks") if layer.has_sinks else None,
        o=maker.linear(read("o"), read("o_bias") if layer.has_o_bias else None),
        attention_output_norm=norms.get("attention_output_norm"),
        mlp_norm=norms.get("mlp_norm"),
        mlp=_mlp(layer, stored, read, maker)
        if layer.moe is None
        else _moe(layer, layer.moe, stored, read, maker),
        mlp_output_norm=norms.get("mlp_output_norm"),
    )


def _qkv_bias(stored: Mapping[str, str], read: ReadTensor) -> torch.Tensor:
    if _is_stored(stored, "qkv"):
        return read("qkv_bias")
    return read("q_bias", "k_bias", "v_bias")


def _qk_norm(config: ModelConfig, layer: LayerSpec, read: ReadTensor) -> NormLayer | None:
    if layer.qk_norm == "none":
        return None
    if layer.qk_norm == "flat":
        q, k = (make_norm(config.norm, read(name), config.norm_eps) for name in ("q_norm", "k_norm"))
        return FlatQkNorm(q, k, layer.num_q_heads)
    # One weight row per head, so that q and k are normed in one operation.
    q_rows = read("q_norm").expand(layer.num_q_heads, -1)
    k_rows = read("k_norm").expand(layer.num_kv_heads, -1)
    return make_norm(config.norm, torch.cat([q_rows, k_rows]), config.norm_eps)


def _mlp(layer: LayerSpec, stored: Mapping[str, str], read: ReadTensor, maker: LayerMaker) -> GatedMlp:
    parts = ("gate_up",) if _is_stored(stored, "gate_up") else ("gate", "up")
    has_bias = layer.has_mlp_bias
    return maker.gated_mlp(
        read(*parts),
        read(*(f"{name}_bias" for name in parts)) if has_bias else None,
        read("down"),
        read("down_bias") if has_bias else None,
        layer.activation,
    )


def _moe(
    layer: LayerSpec, moe: MoeSpec, stored: Mapping[str, str], read: ReadTensor, maker: LayerMaker
) -> GatedMlp:
    router = Router(
        moe,
        read("router"),
        read("router_bias") if moe.has_router_bias else None,
        read("router_correction") if moe.has_correction_bias else None,
    )
    experts = _stored_experts(moe, stored, read)
    return MoeMlp(
        router,
        [maker.gated_mlp(e.gate_up, e.gate_up_bias, e.down, e.down_bias, layer.activation) for e in experts],
    )


@dataclass(frozen=True, slots=True)
class _Expert:
    """gate_up: [2 * dim, hidden], the gate's rows first. down: [hidden, dim]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def _stored_experts(moe: MoeSpec, stored: Mapping[str, str], read: ReadTensor) -> Iterator[_Expert]:
    """The experts in their order, from whichever of the three layouts a checkpoint has."""
    if _is_stored(stored, "experts.{e}.gate"):
        for index in range(moe.num_experts):
            expert = f"experts.{index}"
            yield _Expert(read(f"{expert}.gate", f"{expert}.up"), read(f"{expert}.down"))
    elif _is_stored(stored, "experts_gate_up"):
        for gate_up, down in zip(read("experts_gate_up"), read("experts_down"), strict=True):
            yield _Expert(gate_up, down)
    else:
        gate_up, down = read("experts_mixed"), read("experts_down_transposed")
        gate_up_bias = read("experts_mixed_bias") if moe.has_expert_bias else None
        down_bias = read("experts_down_bias") if moe.has_expert_bias else None
        for index in range(moe.num_experts):
            yield _Expert(
                _unmixed(gate_up[index].T),
                down[index].T.contiguous(),
                None if gate_up_bias is None else _unmixed(gate_up_bias[index]),
                None if down_bias is None else down_bias[index].clone(),
            )


def _unmixed(rows: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, ... as all of the gate and then all of up."""
    return torch.cat([rows[::2], rows[1::2]])
