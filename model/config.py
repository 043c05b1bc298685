"""What a model is, as data: one ModelConfig with one LayerSpec per layer, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.inputs import KINDS, Kind

if TYPE_CHECKING:
    import torch

Norm = Literal["rms", "rms_plus_one"]
Activation = Literal["silu", "gelu_tanh"]
Block = Literal["pre", "sandwich"]
QkNorm = Literal["none", "head"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of a head's first `rotary_dim` dims, halves rotated against each other."""

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """All that distinguishes one layer.

    window: W counts the query itself (a query at p sees (p - W, p]); None for full attention.
    rope: None for no position embedding. qk_norm `head`: RMSNorm over each head of q and k.
    block `pre`: a norm before attention and before the MLP; `sandwich`: also one after each.
    softcap: scores become softcap * tanh(scores / softcap) before the mask.
    """

    window: int | None
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    rope: RopeSpec | None
    attention_scale: float
    mlp_dim: int
    qk_norm: QkNorm = "none"
    softcap: float | None = None
    block: Block = "pre"
    activation: Activation = "silu"
    has_attention_bias: bool = False
    has_mlp_bias: bool = False

    @property
    def kind(self) -> Kind:
        return "full" if self.window is None else "swa"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the decoder, the pools and the scheduler need to know of a model.

    family: key of families.FAMILIES, used for tensor names only. checkpoint_dtype: what the checkpoint
    says its weights are, such as `bfloat16`. eos_token_ids: each of them ends a text.
    embedding_multiplier: embeddings are multiplied by it, rounded to the weights' dtype first.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    norm_eps: float
    is_tied: bool
    context_length: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    embedding_multiplier: float = 1.0
    final_softcap: float | None = None

    def __post_init__(self) -> None:
        windows = {layer.window for layer in self.layers if layer.window is not None}
        if len(windows) > 1:
            raise ModelLoadError(
                f"the model has several sliding windows {sorted(windows)}; one window size is supported"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of attention state that the model has, in the order of KINDS."""
        present = {layer.kind for layer in self.layers}
        return tuple(kind for kind in KINDS if kind in present)

    @property
    def window(self) -> int | None:
        """W of the sliding-window layers, counting the query; None without such layers."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    @property
    def layer_pattern(self) -> str:
        """One letter per layer, S for sliding window and F for full: SSSSSF."""
        return "".join("F" if layer.window is None else "S" for layer in self.layers)

    def kv_bytes_per_token(self, kind: Kind, dtype: torch.dtype) -> int:
        """Bytes that one slot of `kind` takes, over all layers of the kind."""
        dims = sum(
            layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers if layer.kind == kind
        )
        return dims * dtype.itemsize


def load_config(model_dir: Path) -> ModelConfig:
    """Read config.json (and generation_config.json) of a directory in Hugging Face layout.

    Raises ModelLoadError, naming what is missing or unsupported.
    """
    from forkpoint.model.families import read_config

    return read_config(model_dir)
