"""What a model is, as data: one ModelConfig with one LayerSpec per layer, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forkpoint.model.inputs import KINDS, Kind

if TYPE_CHECKING:
    import torch

Norm = Literal["rms", "rms_wide", "rms_plus_one", "layer"]
Block = Literal["pre", "post", "sandwich", "parallel"]
QkNorm = Literal["none", "head", "flat"]
Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """g = min(gate, limit), u = clamp(up, -limit, limit): (u + 1) * g * sigmoid(alpha * g)."""

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiglu


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
class YarnScaling:
    """Dims that turn less than beta_slow times in the original context are divided by `factor`, those that
    turn more than beta_fast times are kept, those between ramped (YaRN).

    is_truncated: the ramp's ends are rounded to whole dims. attention_factor: of cos and sin.
    """

    factor: float
    original_context_length: int
    beta_fast: float
    beta_slow: float
    is_truncated: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """One divisor per dim pair: short_factors up to the original context length, long_factors beyond.

    The served context length decides, not a sequence's own length: a cached key must not change when its
    sequence grows. attention_factor: of cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_length: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of a head's first `rotary_dim` dims.

    is_interleaved: neighbouring dims are rotated against each other; else the halves. is_wide: rotated in
    float32, whatever the weights are.
    """

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    is_interleaved: bool = False
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of an MLP: each row runs `experts_per_token` of `num_experts`.

    scoring `softmax`: over all experts, and the highest are chosen; `softmax_of_chosen`: the highest logits
    are chosen, and weighed by their softmax; `sigmoid`: each expert for itself.
    is_renormalised: the weights of the chosen are divided by their sum. weight_scale: factor after that.
    has_correction_bias: added to the scores to choose by, not to those to weigh by.
    num_groups: experts come in as many groups of equal size; only those of the groups_per_token groups with
    the highest sum of their two best scores can be chosen.
    """

    num_experts: int
    experts_per_token: int
    expert_dim: int
    scoring: Scoring
    is_renormalised: bool
    weight_scale: float = 1.0
    has_router_bias: bool = False
    has_correction_bias: bool = False
    has_expert_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """All that distinguishes one layer.

    window: W counts the query itself (a query at p sees (p - W, p]); None for full attention.
    rope: None for no position embedding. qk_norm `head`: RMSNorm over each head of q and k; `flat`: over all
    heads of q, and over all of k.
    block `pre`: a norm before attention and before the MLP; `post`: one after each; `sandwich`: both;
    `parallel`: one norm, whose result attention and MLP both take.
    softcap: scores become softcap * tanh(scores / softcap) before the mask.
    has_sinks: each query head has one more logit in its softmax, that of a key without value.
    value_scale: values are multiplied by it before they are stored. mlp_dim: unused where `moe` is set.
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
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    value_scale: float = 1.0
    moe: MoeSpec | None = None

    @property
    def kind(self) -> Kind:
        return "full" if self.window is None else "swa"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the decoder, the pools and the scheduler need to know of a model.

    family: key of families.FAMILIES, used for tensor names only. checkpoint_dtype: what the checkpoint
    says its weights are, such as `bfloat16`. eos_token_ids: each of them ends a text.
    norm `rms`: rounded before its weight is multiplied; `rms_wide`: after; `rms_plus_one`: after, and the
    weight is one more than stored; `layer`: of x less its mean, rounded after.
    embedding_multiplier: embeddings are multiplied by it, rounded to the weights' dtype first.
    residual_multiplier: of what attention and MLP add. logit_multiplier: before final_softcap.
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
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    final_softcap: float | None = None

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
        """W of the sliding-window layers, counting the query; None without such layers.

        The largest, where they differ: all of them are one kind, whose pages live as long as any layer needs
        them. Attention looks at each layer's own window.
        """
        return max((layer.window for layer in self.layers if layer.window is not None), default=None)

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
