"""Choose an attention backend by name."""

from __future__ import annotations

import torch

from forkpoint.configs.errors import ConfigError
from forkpoint.model.attention.base import AttentionBackend
from forkpoint.model.attention.native import NativeBackend
from forkpoint.model.attention.tiles import TilesBackend
from forkpoint.model.attention.torch_reference import TorchReferenceBackend
from forkpoint.model.config import ModelConfig
from forkpoint.model.kv import KvPools
from forkpoint.model.native.attention import attention_kernel


def make_backend(name: str, config: ModelConfig, pools: KvPools, device: torch.device) -> AttentionBackend:
    """The backend called `name` (auto, torch, cpu). Raises ConfigError for others or if it cannot run."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "torch"
    if name == "torch":
        return TorchReferenceBackend(config, pools, device)
    if name == "cpu":
        if device.type != "cpu":
            raise ConfigError(
                f"attention backend cpu cannot run on {device.type}",
                hint="use --attention-backend auto, or --device cpu",
            )
        kernel = attention_kernel()
        return TilesBackend(config, pools) if kernel is None else NativeBackend(config, pools, kernel)
    if name == "flashinfer":
        raise ConfigError(
            "attention backend flashinfer is not built yet", hint="use --attention-backend torch"
        )
    raise ConfigError(
        f"attention backend {name!r} is unknown", hint="--attention-backend takes auto, torch or cpu"
    )
