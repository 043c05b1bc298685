"""Finds and loads the kernels, and says which instructions they may use.

Built by pip (pyproject.toml, ext-modules) as one shared library without Python or torch headers. Left out
where there is no compiler; whoever asks gets None and takes the torch path, which stays the oracle.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import structlog
import torch  # noqa: F401  its OpenMP runtime is the one that the kernels run on: one pool of threads

_log = structlog.stdlib.get_logger("forkpoint.engine")


class Feature(enum.IntFlag):
    """Instructions of a CPU. The same numbers as in features.h."""

    AVX2 = 1
    AVX512 = 2
    AVX512_VNNI = 4
    AVX512_BF16 = 8
    AMX_BF16 = 16
    AMX_INT8 = 32
    AVX_VNNI = 64


def library_file() -> Path | None:
    """Where the kernels lie; None if they were not built."""
    return next(iter(sorted(Path(__file__).parent.glob("_kernels*.so"))), None)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The loaded kernels; None where they were not built, do not load, or the CPU lacks AVX2."""
    file = library_file()
    if file is None:
        return None
    try:
        # Its calls into OpenMP are resolved by the runtime that torch has loaded for all.
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        _log.warning("native_kernels_unusable", reason=str(error))
        return None
    loaded.forkpoint_features.restype = ctypes.c_uint32
    loaded.forkpoint_allow_features.argtypes = [ctypes.c_uint32]
    return loaded if Feature.AVX2 in Feature(loaded.forkpoint_features()) else None


def features() -> Feature:
    """What the kernels may use here; none without kernels."""
    loaded = library()
    return Feature(0) if loaded is None else Feature(loaded.forkpoint_features())


@contextlib.contextmanager
def only(allowed: Feature) -> Iterator[None]:
    """Within it the kernels use no other features than `allowed`: how tests reach the paths of other CPUs."""
    loaded = library()
    assert loaded is not None
    loaded.forkpoint_allow_features(allowed)
    try:
        yield
    finally:
        loaded.forkpoint_allow_features(0xFFFFFFFF)
