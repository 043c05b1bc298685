"""The weights of a decoder, ready to run, and the names and shapes of the tensors they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from forkpoint.model.config import LayerSpec, ModelConfig, Norm
from forkpoint.model.linear import GatedMlp, Linear, make_gated_mlp, make_linear

Shape = tuple[int, ...]
ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """weight: [D], or [H, D] for a norm of every head; for rms_plus_one float32 with the 1 added.

    eps: float32 scalar on the same device.
    """

    weight: torch.Tensor
    norm: Norm
    eps: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dim of x, in float32.

        rms_plus_one multiplies in float32 and rounds once, rms rounds before it multiplies: as transformers.
        """
        wide = x.float()
        # Five operations where F.rms_norm is eight on a CPU: 10 us against 16 for one row, 91 times a step.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed = wide * torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        if self.norm == "rms_plus_one":
            return normed.mul_(self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv gives q's, k's and v's heads in a row. qk_norm: [Hq + Hkv, k_dim], q's heads first."""

    attention_norm: NormWeight
    qkv: Linear
    qk_norm: NormWeight | None
    o: Linear
    attention_output_norm: NormWeight | None
    mlp_norm: NormWeight
    mlp: GatedMlp
    mlp_output_norm: NormWeight | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding: [V, hidden], unscaled, in the model's dtype and on its device."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeight
    lm_head: Linear


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of `config` must hold, by our names (layers.3.q, ...)."""
    shapes: dict[str, Shape] = {
        "embedding": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.is_tied:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    for index, layer in enumerate(config.layers):
        for name, shape in _layer_shapes(layer, config.hidden_size).items():
            shapes[f"layers.{index}.{name}"] = shape
    return shapes


def count_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def build_weights(config: ModelConfig, read: ReadTensor) -> ModelWeights:
    """Assemble the weights; `read` gives a tensor by our name, in the right dtype and on the device.

    Reads layer by layer and packs at once, so that only one layer is held twice.
    """
    embedding = read("embedding")
    layers = tuple(
        _build_layer(config, layer, lambda name, i=index: read(f"layers.{i}.{name}"))  # type: ignore[misc]
        for index, layer in enumerate(config.layers)
    )
    # Packing a tied head copies it: rows cannot be looked up in packed weights. Decoding 8 rows is worth it.
    head = embedding if config.is_tied else read("lm_head")
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_norm(config, read("final_norm")),
        lm_head=make_linear(head, None),
    )


def _layer_shapes(layer: LayerSpec, hidden: int) -> Mapping[str, Shape]:
    q_dim = layer.num_q_heads * layer.k_dim
    k_dim = layer.num_kv_heads * layer.k_dim
    v_dim = layer.num_kv_heads * layer.v_dim
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "q": (q_dim, hidden),
        "k": (k_dim, hidden),
        "v": (v_dim, hidden),
        "o": (hidden, layer.num_q_heads * layer.v_dim),
        "mlp_norm": (hidden,),
        "gate": (layer.mlp_dim, hidden),
        "up": (layer.mlp_dim, hidden),
        "down": (hidden, layer.mlp_dim),
    }
    if layer.qk_norm == "head":
        shapes |= {"q_norm": (layer.k_dim,), "k_norm": (layer.k_dim,)}
    if layer.block == "sandwich":
        shapes |= {"attention_output_norm": (hidden,), "mlp_output_norm": (hidden,)}
    if layer.has_attention_bias:
        shapes |= {"q_bias": (q_dim,), "k_bias": (k_dim,), "v_bias": (v_dim,), "o_bias": (hidden,)}
    if layer.has_mlp_bias:
        shapes |= {"gate_bias": (layer.mlp_dim,), "up_bias": (layer.mlp_dim,), "down_bias": (hidden,)}
    return shapes


def _build_layer(config: ModelConfig, layer: LayerSpec, read: ReadTensor) -> LayerWeights:
    is_sandwich = layer.block == "sandwich"
    has_bias = layer.has_attention_bias
    return LayerWeights(
        attention_norm=_norm(config, read("attention_norm")),
        qkv=make_linear(
            torch.cat([read(name) for name in ("q", "k", "v")]),
            torch.cat([read(name) for name in ("q_bias", "k_bias", "v_bias")]) if has_bias else None,
        ),
        qk_norm=_qk_norm(config, layer, read),
        o=make_linear(read("o"), read("o_bias") if has_bias else None),
        attention_output_norm=_norm(config, read("attention_output_norm")) if is_sandwich else None,
        mlp_norm=_norm(config, read("mlp_norm")),
        mlp=make_gated_mlp(
            torch.cat([read("gate"), read("up")]),
            torch.cat([read("gate_bias"), read("up_bias")]) if layer.has_mlp_bias else None,
            read("down"),
            read("down_bias") if layer.has_mlp_bias else None,
            layer.activation,
        ),
        mlp_output_norm=_norm(config, read("mlp_output_norm")) if is_sandwich else None,
    )


def _qk_norm(config: ModelConfig, layer: LayerSpec, read: ReadTensor) -> NormWeight | None:
    if layer.qk_norm == "none":
        return None
    # One weight row per head, so that q and k are normed in one operation.
    q_rows = read("q_norm").expand(layer.num_q_heads, -1)
    k_rows = read("k_norm").expand(layer.num_kv_heads, -1)
    return _norm(config, torch.cat([q_rows, k_rows]))


def _norm(config: ModelConfig, weight: torch.Tensor) -> NormWeight:
    if config.norm == "rms_plus_one":
        weight = weight.float() + 1.0
    eps = torch.tensor(config.norm_eps, dtype=torch.float32, device=weight.device)
    return NormWeight(weight, config.norm, eps)
