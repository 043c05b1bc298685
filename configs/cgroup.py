"""What a container may use: the limits of the process' control groups, version 1 or 2.

The kernel reports the whole machine's memory and cores inside a container; docker's and Kubernetes' limits
stand in files under /sys/fs/cgroup (kernel documentation, admin-guide/cgroup-v1 and cgroup-v2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# Version 1 writes "no limit" as the largest whole page below 2^63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that the group may use, and bytes that it could still take (page cache can be dropped)."""

    total: int
    available: int


def memory_limit(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> MemoryLimit | None:
    """The tightest limit on memory among this process' groups and those above; None if there is none."""
    limits = []
    for folder, is_v2 in _folders("memory", cgroups, own_groups):
        limit = _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        droppable = _statistic(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file")
        limits.append(MemoryLimit(limit, max(0, limit - used + droppable)))
    if not limits:
        return None
    return MemoryLimit(min(limit.total for limit in limits), min(limit.available for limit in limits))


def cpu_limit(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> float | None:
    """Cores' worth of time that the tightest quota allows (1.5: one and a half); None if there is none."""
    limits = []
    for folder, is_v2 in _folders("cpu", cgroups, own_groups):
        if is_v2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _folders(controller: str, cgroups: Path, own_groups: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of this process' groups, innermost first up to the root; whether each is of version 2."""
    for line in _text(own_groups).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = cgroups if is_v2 else cgroups / controller
        group = root / path.lstrip("/")
        # A group that is not there: the container sees its own group as the root.
        yield from ((folder, is_v2) for folder in (group, *group.parents) if folder.is_relative_to(root))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None  # "max": no limit


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
