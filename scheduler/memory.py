"""How much memory the KV pools may take: what is free on the device, and what a flag asks for."""

from __future__ import annotations

import psutil
import torch

from forkpoint.configs.cgroup import memory_limit
from forkpoint.configs.errors import ConfigError
from forkpoint.configs.serving import EngineConfig

# Share of the memory that is free after the weights, when neither bytes nor a share is given.
DEFAULT_CPU_SHARE = 0.25
MAX_DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CUDA_SHARE = 0.88


def available_bytes(device: torch.device) -> int:
    """What could be allocated on the device now; on the CPU no more than the container's limit leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit = memory_limit()
    return available if limit is None else min(available, limit.available)


def check_kv_memory(config: EngineConfig, available: int) -> None:
    """Raise ConfigError when --kv-cache-memory-bytes is beyond what is available.

    The pools of a CPU are given memory page by page as they are used: a pool that is too large would be made
    without complaint, and the process killed in the middle of a request.
    """
    wanted = config.kv_cache_memory_bytes
    if wanted is not None and wanted > available:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {wanted} ({gib(wanted)}); {gib(available)} of memory are available",
            hint="lower --kv-cache-memory-bytes",
        )


def kv_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    """What both pools may take together, now that the weights are in memory."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = config.mem_fraction_static or DEFAULT_CUDA_SHARE
        return max(0, int(total * share) - (total - free))
    if config.mem_fraction_static is not None:
        total, limit = psutil.virtual_memory().total, memory_limit()
        if limit is not None:
            total = min(total, limit.total)
        return max(0, int(total * config.mem_fraction_static) - psutil.Process().memory_info().rss)
    return min(int(available_bytes(device) * DEFAULT_CPU_SHARE), MAX_DEFAULT_CPU_BYTES)


def gib(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 2**30:,.1f} GiB"
