"""Tiny random checkpoints of every family, made with transformers, and transformers' logits for them.

Everything is randomised, norms, biases, sinks and buffers too, and scaled so that attention is far from
uniform: with the initial values of transformers a window off by one would move the logits by 1e-3 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from support.tiny_configs import CONFIGS as CONFIGS
from support.tiny_configs import VOCAB_SIZE as VOCAB_SIZE
from support.tiny_configs import WINDOW as WINDOW
from support.tiny_configs import gemma3_config as gemma3_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig


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
        model = _auto_class(config).from_config(config, dtype=torch.float32)
        _randomise(model)
    model.save_pretrained(directory, **save_options)
    return directory


def _auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


@lru_cache(maxsize=8)
def _reference_model(model_dir: Path) -> Any:
    config = PreTrainedConfig.get_config_dict(model_dir)[0]
    auto_class: Callable[..., Any] = (
        AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    ).from_pretrained
    model = auto_class(model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    return model.eval()


# Many tests ask for the logits of the same prompt.
@lru_cache(maxsize=64)
def _reference_logits(model_dir: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = _reference_model(model_dir)(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0]


def reference_logits(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits of every position, [T, V] float32: one forward, no cache, eager attention."""
    return _reference_logits(model_dir, tuple(token_ids))


def _randomise(model: torch.nn.Module) -> None:
    buffers: Mapping[str, torch.Tensor] = {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *buffers.items()]:
            noise = torch.randn_like(tensor)
            if "norm" in name:
                # Norms of `1 + w` start at 0, others at 1: both end near 1 +- 0.3.
                tensor.add_(0.3 * noise)
            elif name.endswith("sinks"):
                tensor.copy_(1 + noise)
            elif name.endswith("bias"):
                tensor.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise / 4)
            else:
                tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
