"""Tiny random checkpoints of every family, made with transformers, and transformers' logits for them.

Everything is randomised, norms and biases too, and scaled so that attention is far from uniform: with the
initial values of transformers a window that is off by one would move the logits by 1e-3 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

VOCAB_SIZE = 256
WINDOW = 12

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def gemma3_config() -> PreTrainedConfig:
    """SSSSSFSF, two thetas, linear scaling on the full layers, a scale that is not head_dim's, softcap."""
    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=8,
        layer_types=[{"S": "sliding_attention", "F": "full_attention"}[kind] for kind in "SSSSSFSF"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        final_logit_softcapping=30.0,
        eos_token_id=[1, 106],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    )


def llama_config() -> PreTrainedConfig:
    """All full, llama3 scaling with wavelengths on both sides of its bounds, biases, untied."""
    return LlamaConfig(
        **_COMMON,
        num_hidden_layers=6,
        mlp_bias=True,
        eos_token_id=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


def qwen3_config() -> PreTrainedConfig:
    """All full, norms on the heads of q and k, tied."""
    return Qwen3Config(**_COMMON, num_hidden_layers=6, tie_word_embeddings=True, eos_token_id=1)


def qwen3_sliding_config() -> PreTrainedConfig:
    """FFFSSS: a sliding layer is last, so what only the last layer needs is windowed."""
    return Qwen3Config(
        **_COMMON,
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=3,
        eos_token_id=1,
    )


def qwen3_all_sliding_config() -> PreTrainedConfig:
    """SSSSSS: a model without any full layer."""
    return Qwen3Config(
        **_COMMON,
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        eos_token_id=1,
    )


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": gemma3_config,
    "llama": llama_config,
    "qwen3": qwen3_config,
    "qwen3_sliding": qwen3_sliding_config,
    "qwen3_all_sliding": qwen3_all_sliding_config,
}


def save_tiny_checkpoint(name: str, directory: Path, *, seed: int = 0, **save_options: Any) -> Path:
    """Make and save the checkpoint called `name` (a key of CONFIGS). Returns its directory."""
    return save_random_checkpoint(CONFIGS[name](), directory, seed=seed, **save_options)


def save_random_checkpoint(
    config: PreTrainedConfig, directory: Path, *, seed: int = 0, **save_options: Any
) -> Path:
    """Make and save a checkpoint of `config` with random weights. Returns its directory."""
    # Built under fork_rng: making a model must not move the generator of the test that asks for it.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
    model.save_pretrained(directory, **save_options)
    return directory


@lru_cache(maxsize=8)
def _reference_model(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits of every position, [T, V] float32: one forward, no cache, eager attention."""
    logits: torch.Tensor = _reference_model(model_dir)(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def _randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                # Norms of `1 + w` start at 0, others at 1: both end near 1 +- 0.3.
                parameter.add_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise / 4)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
