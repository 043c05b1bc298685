"""Simulations count what the scheduler and the cache did, and the cache serves what it should."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from forkpoint.cache.eviction import EVICTION_POLICIES
from forkpoint.cache.retention import RETENTION_POLICIES
from forkpoint.configs.errors import ConfigError
from forkpoint.scheduler.simulate import SimulationSetup, simulate
from forkpoint.scheduler.simulate_report import SimulationReport
from forkpoint.scheduler.trace_pools import PoolSlots, ample_pools, tight_pools
from forkpoint.scheduler.traces import WORKLOAD_KINDS, TraceRequest, Workload, WorkloadKind

REFERENCE = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "sglang_0_5_23.csv"
AMPLE = PoolSlots(10_000, 10_000)
FORKING: tuple[WorkloadKind, ...] = ("shared", "zipf", "groups", "fewshot")


@cache
def workload(kind: WorkloadKind) -> tuple[Workload, list[TraceRequest]]:
    made = Workload(kind, num_requests=16 if kind == "chat" else 64)
    return made, made.requests()


def replay(kind: WorkloadKind, pools: str, **policies: str | bool | int) -> SimulationReport:
    """The published driver's setting: page 1, window 128, chunk 3072, one request at a time."""
    made, requests = workload(kind)
    concurrency = int(policies.get("concurrency", 1))
    slots = ample_pools(requests, page_size=1, chunk=3072)
    if pools == "tight":
        slots = tight_pools(made, page_size=1, window=128, chunk=3072, concurrency=concurrency)
    return simulate(requests, SimulationSetup(slots, **policies))  # type: ignore[arg-type]


def request(prompt: list[int], output: int = 1) -> TraceRequest:
    """The answer is made of tokens that no prompt here has."""
    return TraceRequest("", np.array(prompt, dtype=np.int32), np.arange(900, 900 + output, dtype=np.int32))


def check_sums(report: SimulationReport) -> None:
    assert report.leaked_slots == 0
    assert report.prompt_tokens == report.served_tokens + report.computed_tokens
    assert report.prompt_tokens == sum(entry.prompt_tokens for entry in report.requests)
    for entry in report.requests:
        assert entry.prompt_tokens == entry.cached + entry.rebuilt + entry.computed
        assert 0 <= entry.resume <= entry.full_hit < entry.prompt_tokens
        assert entry.computed >= 1


@pytest.mark.parametrize("retention", sorted(RETENTION_POLICIES))
@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_a_full_hit_is_always_served_whatever_windows_are_kept(kind: WorkloadKind, retention: str) -> None:
    report = replay(kind, "ample", retention=retention)
    check_sums(report)
    assert report.served_pct >= report.ideal_pct - 0.01
    assert (report.evicted_full_slots, report.retractions) == (0, 0)
    assert report.row_layers_ideal <= report.row_layers < report.row_layers_nocache


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_no_slot_leaks_from_pools_that_are_far_too_small(kind: WorkloadKind, eviction: str) -> None:
    _, requests = workload(kind)
    setup = SimulationSetup(PoolSlots(6000, 2000), chunk=1024, concurrency=3, eviction=eviction)
    report = simulate(requests, setup)
    check_sums(report)
    assert report.evicted_full_slots > 0
    assert report.peak_full_slots <= 6000
    assert report.peak_swa_slots <= 2000


@pytest.mark.parametrize("kind", FORKING)
def test_without_rebuilds_it_serves_what_the_reference_does(kind: WorkloadKind) -> None:
    ours = replay(kind, "ample", retention="branch", eviction="lru", rebuilds=False)
    check_sums(ours)
    with REFERENCE.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    (theirs,) = (
        row
        for row in rows
        if (row["kind"], row["system"], row["window"], row["page_size"]) == (kind, "2048", "128", "1")
        and (row["concurrency"], row["pools"]) == ("1", "ample")
    )
    assert ours.ideal_pct == pytest.approx(float(theirs["ideal_pct"]), abs=0.005)
    assert ours.served_pct == pytest.approx(float(theirs["branch_pct"]), abs=2)


@pytest.mark.parametrize("kind", FORKING)
def test_branch_points_are_worth_their_windows_in_tight_pools(kind: WorkloadKind) -> None:
    branch = replay(kind, "tight", retention="branch", eviction="lru", rebuilds=False)
    tail = replay(kind, "tight", retention="tail", eviction="lru", rebuilds=False)
    check_sums(branch)
    check_sums(tail)
    assert branch.served_pct > tail.served_pct + 20
    assert branch.row_layers < tail.row_layers


@pytest.mark.parametrize("chunk", [5, 16, 1000])
@pytest.mark.parametrize(
    ("layers", "cached", "rebuild_rows"), [("SF", 53, 0), ("SSF", 46, 7), ("FSFSS", 39, 21 + 14 + 14 + 7)]
)
def test_a_rebuild_costs_the_rows_of_its_staircase(
    layers: str, cached: int, rebuild_rows: int, chunk: int
) -> None:
    # The second prompt leaves the first at 60, below the window at the end of the first, at 80.
    common = list(range(60))
    requests = [request([*common, *range(100, 120)]), request([*common, *range(200, 220)])]
    setup = SimulationSetup(AMPLE, window=8, layers=layers, chunk=chunk, retention="tail", eviction="lru")
    report = simulate(requests, setup)
    check_sums(report)
    second = report.requests[1]
    assert (second.full_hit, second.resume, second.cached, second.rebuilt) == (60, 0, cached, 60 - cached)
    assert report.row_layers == len(layers) * (80 + 20) + rebuild_rows
    assert report.row_layers_ideal == len(layers) * (80 + 20)
    assert report.row_layers_nocache == len(layers) * 160
    assert report.served_pct == report.ideal_pct == 100 * 60 / 160


def test_without_rebuilds_the_gap_is_computed_in_every_layer() -> None:
    common = list(range(60))
    requests = [request([*common, *range(100, 120)]), request([*common, *range(200, 220)])]
    setup = SimulationSetup(AMPLE, window=8, layers="SSF", retention="tail", eviction="lru", rebuilds=False)
    report = simulate(requests, setup)
    check_sums(report)
    second = report.requests[1]
    assert (second.full_hit, second.resume, second.cached, second.rebuilt) == (60, 0, 0, 0)
    assert report.row_layers == report.row_layers_nocache == 3 * 160


def test_retracted_work_is_counted_apart() -> None:
    # Admission sees room for three prompts and 32 tokens of each answer; the answers turn out longer.
    requests = [request([*range(index, index + 20)], output=100) for index in (0, 100, 200)]
    setup = SimulationSetup(PoolSlots(200, 10_000), window=8, layers="SF", concurrency=3)
    report = simulate(requests, setup)
    check_sums(report)
    assert report.retractions > 0
    assert report.recomputed_tokens > 0
    assert report.computed_tokens == report.prompt_tokens == 60
    # What was repeated ran in both layers, some of it maybe as rebuilds; each answer token that was generated
    # before its sequence was retracted, and not computed yet, runs as part of the new prefill.
    repeated = report.row_layers - 2 * 60
    assert 0 < repeated <= 2 * (report.recomputed_tokens + report.retractions)
    assert report.peak_full_slots <= 200


def test_peaks_are_what_running_requests_hold() -> None:
    alone = simulate(
        [request([*range(100)], output=50)], SimulationSetup(AMPLE, window=8, layers="SF", chunk=40)
    )
    check_sums(alone)
    assert alone.peak_full_slots == 100 + 49  # the last token is never computed
    assert alone.peak_swa_slots == 40 + (8 - 1) + 16  # a chunk on top of a window and its margin
    twice = simulate(
        [request([*range(100)], output=50), request([*range(500, 600)], output=50)],
        SimulationSetup(AMPLE, window=8, layers="SF", chunk=1000, concurrency=2),
    )
    assert twice.peak_full_slots == 2 * 149
    assert twice.peak_swa_slots == 200


def test_a_model_without_sliding_layers_has_no_windows() -> None:
    common = list(range(60))
    requests = [request([*common, *range(100, 120)]), request([*common, *range(200, 220)])]
    report = simulate(requests, SimulationSetup(PoolSlots(1000, 0), layers="FF"))
    check_sums(report)
    assert report.requests[1].cached == report.requests[1].resume == 60
    assert (report.peak_swa_slots, report.evicted_swa_slots) == (0, 0)


def test_a_model_of_sliding_layers_only_serves_hits_too() -> None:
    common = list(range(60))
    requests = [request([*common, *range(100, 120)]), request([*common, *range(200, 220)])]
    report = simulate(
        requests, SimulationSetup(AMPLE, window=8, layers="SS", retention="tail", eviction="lru")
    )
    check_sums(report)
    assert report.requests[1].full_hit == 60
    assert report.served_pct == report.ideal_pct


def test_a_request_without_output_ends_after_its_prompt() -> None:
    empty = TraceRequest("", np.arange(50, dtype=np.int32), np.zeros(0, dtype=np.int32))
    report = simulate([empty, empty], SimulationSetup(AMPLE, window=8, layers="SF"))
    check_sums(report)
    assert [entry.full_hit for entry in report.requests] == [0, 49]
    assert report.peak_full_slots == 50


def test_requests_and_pools_that_do_not_fit_are_refused() -> None:
    long = request([*range(100)], output=50)
    with pytest.raises(ConfigError, match="need 149 full slots; there are 120") as caught:
        simulate([long], SimulationSetup(PoolSlots(120, 1000), window=8, layers="SF"))
    assert caught.value.hint == "give the pool more by --full-slots"
    with pytest.raises(ConfigError, match="need 112 full slots; there are 96"):
        simulate([request([*range(90)])], SimulationSetup(PoolSlots(100, 1000), page_size=16, window=8))
    with pytest.raises(ConfigError, match="the SWA pool has 20 slots; window 8, margin 16") as caught:
        simulate([long], SimulationSetup(PoolSlots(1000, 20), window=8, layers="SF"))
    assert "--swa-slots" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="can be simulated"):
        simulate([long], SimulationSetup(PoolSlots(10**15, 1000), window=8, layers="SF"))
