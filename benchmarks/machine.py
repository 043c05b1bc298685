"""What a result was measured on, in one line: processor, cores, memory, versions, threads."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import psutil
import torch


def machine_line() -> str:
    """Processor, usable cores, vector units, memory, Python, torch and its threads, date."""
    capabilities = torch.cpu.get_capabilities()
    fast = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_processor()}, {cores} cores, {', '.join(fast) or 'no vector units'}; "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB; {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
