"""Resolve what `auto` means on this machine: device, dtype of weights, dtype of KV, number of threads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forkpoint.configs.cores import num_usable_cores
from forkpoint.configs.errors import ConfigError

_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """auto: cuda if there is one, else cpu. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device cuda was asked for, but torch sees no CUDA device",
                hint="use --device cpu, or --device auto, which takes CUDA where there is one",
            )
        return torch.device("cuda")
    raise ConfigError(f"device {name!r} is unknown", hint="--device takes auto, cpu or cuda")


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """dtype of the weights and of all computation.

    auto on a CPU: bfloat16 where the machine multiplies it (AVX-512 BF16 or AMX), else float32, since
    emulated bfloat16 is slower than float32. auto on CUDA: the checkpoint's own, bfloat16 for float16.
    """
    if name != "auto":
        return _named_dtype(name, flag="--dtype")
    if device.type == "cpu":
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    return torch.float32 if checkpoint_dtype == "float32" else torch.bfloat16


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """dtype of cached keys and values; auto: as the weights."""
    return dtype if name == "auto" else _named_dtype(name, flag="--kv-cache-dtype")


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def set_num_threads(num_threads: int | None = None) -> int:
    """Set torch's threads for this process, before its first operation. Returns their number.

    None: one per core that this process may use, or fewer if OMP_NUM_THREADS says so (torch has read it).
    """
    if num_threads is None:
        # torch counts the machine's processors, whatever a container's quota leaves of them.
        num_threads = min(num_usable_cores(), torch.get_num_threads())
    torch.set_num_threads(num_threads)
    return num_threads


def num_compute_threads(device: torch.device) -> int:
    """How many threads a model on this device computes with in this process; 0 where it is no CPU."""
    return torch.get_num_threads() if device.type == "cpu" else 0


def _named_dtype(name: str, *, flag: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; known: auto, {', '.join(_DTYPES)}", hint=flag)
    return _DTYPES[name]
