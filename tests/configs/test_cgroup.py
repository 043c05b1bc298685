"""A container's limits, read from folders laid out as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from forkpoint.configs.cgroup import MemoryLimit, cpu_limit, memory_limit
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler import memory

MIB = 1 << 20


def world(tmp_path: Path, own_groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(cgroups, own_groups) with these files below the mount."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text(own_groups)
    return tmp_path / "cgroup", own


def v2_memory(group: str, limit: str, used: int, inactive: int) -> dict[str, str]:
    return {
        f"{group}memory.max": f"{limit}\n",
        f"{group}memory.current": f"{used}\n",
        f"{group}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_version_2_memory_counts_page_cache_as_available(tmp_path: Path) -> None:
    where = world(tmp_path, "0::/\n", v2_memory("", str(800 * MIB), 500 * MIB, 100 * MIB))
    assert memory_limit(*where) == MemoryLimit(800 * MIB, 400 * MIB)


def test_the_tightest_of_the_groups_above_decides(tmp_path: Path) -> None:
    files = v2_memory("pods/a/", "max", 5 * MIB, 0) | v2_memory("pods/", str(64 * MIB), 60 * MIB, 0)
    where = world(tmp_path, "0::/pods/a\n", files)
    assert memory_limit(*where) == MemoryLimit(64 * MIB, 4 * MIB)


def test_a_group_that_the_container_does_not_see_is_its_root(tmp_path: Path) -> None:
    where = world(tmp_path, "0::/docker/0123\n", v2_memory("", str(64 * MIB), 0, 0))
    assert memory_limit(*where) == MemoryLimit(64 * MIB, 64 * MIB)


def test_version_1_memory(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": f"{64 * MIB}",
        "memory/box/memory.usage_in_bytes": f"{100 * MIB}",
        "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
    }
    where = world(tmp_path, "5:cpu,cpuacct:/\n4:memory:/box\n0::/\n", files)
    assert memory_limit(*where) == MemoryLimit(64 * MIB, 14 * MIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", "lots"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    assert memory_limit(*world(tmp_path, "0::/\n", v2_memory("", limit, 1, 0))) is None


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none", tmp_path / "none") is None
    assert cpu_limit(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("own_groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/a\n", {"a/cpu.max": "max 100000", "cpu.max": "50000 100000"}, 0.5),
        (
            "5:cpu,cpuacct:/b\n",
            {"cpu/b/cpu.cfs_quota_us": "400000", "cpu/b/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("5:cpu:/b\n", {"cpu/b/cpu.cfs_quota_us": "-1", "cpu/b/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, own_groups: str, files: dict[str, str], cores: float | None) -> None:
    assert cpu_limit(*world(tmp_path, own_groups, files)) == cores


def test_kv_pools_keep_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    free = memory.available_bytes(cpu)
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(64 * MIB, 32 * MIB))
    assert memory.available_bytes(cpu) == 32 * MIB < free
    assert memory.kv_memory_bytes(EngineConfig(Path("m")), cpu) == 8 * MIB
    share = EngineConfig(Path("m"), mem_fraction_static=1.0)
    assert memory.kv_memory_bytes(share, cpu) <= 64 * MIB < psutil.virtual_memory().total
