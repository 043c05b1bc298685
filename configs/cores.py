"""How many cores this process may compute on: those it is allowed, each once, within its quota."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from forkpoint.configs.cgroup import cpu_limit

PROCESSORS = Path("/sys/devices/system/cpu")


def num_usable_cores() -> int:
    """Physical cores that this process may use, at least 1.

    Two hyperthreads of a core count once: they share its vector units, so a second thread gains nothing in a
    matrix product and waits at every barrier. A quota (docker --cpus) counts as the cores that it is worth.
    """
    return within_quota(num_physical(allowed_processors()), cpu_limit())


def allowed_processors() -> Collection[int]:
    """Numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def num_physical(processors: Collection[int], folder: Path = PROCESSORS) -> int:
    """Of logical processors, the number of cores they lie on; where the system does not tell, each is one."""
    return len({_siblings(folder, number) for number in processors})


def within_quota(num_cores: int, limit: float | None) -> int:
    """num_cores, or as many as `limit` cores' worth of time is nearest to; at least 1."""
    return num_cores if limit is None else max(1, min(num_cores, int(limit + 0.5)))


def _siblings(folder: Path, number: int) -> str:
    """Names a processor's core: the list of its hyperthreads, which is the same for each of them."""
    try:
        return (folder / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return str(number)
