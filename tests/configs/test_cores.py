"""The number of cores: hyperthreads of a core once, within affinity and quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forkpoint.configs.cores import allowed_processors, num_physical, num_usable_cores, within_quota


def machine_of(tmp_path: Path, siblings: dict[int, str]) -> Path:
    """A folder as /sys/devices/system/cpu, with these lists of hyperthreads."""
    for number, text in siblings.items():
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n", encoding="ascii")
    return tmp_path


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        ({0, 1, 2, 3}, 2),
        ({0, 2}, 1),  # both threads of one core
        ({0, 1}, 2),
        ({3}, 1),
    ],
)
def test_hyperthreads_of_a_core_count_once(tmp_path: Path, allowed: set[int], cores: int) -> None:
    machine = machine_of(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert num_physical(allowed, machine) == cores


def test_processors_of_unknown_topology_are_a_core_each(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, {0: "0-1", 1: "0-1"})
    assert num_physical({0, 1, 2, 3}, machine) == 3


@pytest.mark.parametrize(
    ("num_cores", "limit", "usable"),
    [(64, None, 64), (64, 2.0, 2), (64, 1.5, 2), (64, 1.2, 1), (64, 0.1, 1), (2, 8.0, 2), (64, 3.4, 3)],
)
def test_a_quota_counts_as_the_cores_it_is_worth(num_cores: int, limit: float | None, usable: int) -> None:
    assert within_quota(num_cores, limit) == usable


def test_no_more_cores_are_usable_than_this_process_is_bound_to() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert list(allowed_processors()) == [min(before)]
        assert num_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
