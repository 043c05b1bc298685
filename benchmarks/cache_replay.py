"""Replays every built-in workload through the cache and sets the results beside the reference's.

    python benchmarks/cache_replay.py            160 rows, five arms; writes benchmarks/results/cache_replay.*
    python benchmarks/cache_replay.py --quick    40 rows, three arms; prints only, unless --out names a folder

Status 1 if a slot leaked, or an arm with rebuilds served less than the ideal. Plots need the extra `bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path

from replay_rows import ARMS, QUICK_ARMS, Arm, Outcome, Row, read_reference, rows
from replay_tables import by_row, group_table, row_table, shortfalls, write_csv

from forkpoint.scheduler.simulate import SimulationSetup, simulate
from forkpoint.scheduler.trace_pools import PoolSlots, ample_pools, tight_pools
from forkpoint.scheduler.traces import TraceRequest, Workload, WorkloadKind

RESULTS = Path(__file__).parent / "results"
CHUNK = 3072
HEADING = """# Cache replay

Made by `python benchmarks/cache_replay.py`. Counts, not times: they are the same on any machine.
An arm is `--retention`, `--eviction`; all but one rebuild. SGLang is 0.5.23, measured on CPU.
"""


def main() -> int:
    """Run, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="system prompts of 2,048 tokens and page 1 only")
    parser.add_argument("--out", type=Path, help="folder for table, CSV and plot")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    folder = arguments.out or (None if arguments.quick else RESULTS)

    started = time.monotonic()
    jobs = list(product(rows(is_quick=arguments.quick), QUICK_ARMS if arguments.quick else ARMS))
    with ProcessPoolExecutor(arguments.processes) as pool:
        # Rows of one workload are neighbours: a process that takes several makes it once.
        results = list(pool.map(replay, jobs, chunksize=8))
    outcomes, reference = by_row(results), read_reference()
    wrong, slower = shortfalls(outcomes, reference)

    table = row_table(outcomes, reference)
    summary = _summary(group_table(outcomes), wrong, slower)
    print(table)
    print(summary)
    print(f"{len(jobs)} simulations in {time.monotonic() - started:.0f} s")
    if folder is not None:
        from replay_plot import plot

        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / "cache_replay.csv", results)
        (folder / "cache_replay.md").write_text(f"{HEADING}\n{summary}\n## Every row\n\n{table}")
        plot(folder / "cache_replay.png", outcomes, reference)
        print(f"written to {folder}")
    return 1 if wrong else 0


def replay(job: tuple[Row, Arm]) -> Outcome:
    """One simulation."""
    row, arm = job
    workload, requests = _workload(row.kind, row.system)
    report = simulate(
        requests,
        SimulationSetup(
            _slots(row, workload, requests),
            page_size=row.page_size,
            window=row.window,
            chunk=CHUNK,
            concurrency=row.concurrency,
            retention=arm.retention,
            eviction=arm.eviction,
            rebuilds=arm.rebuilds,
        ),
    )
    return Outcome(
        row,
        arm.name,
        served_pct=report.served_pct,
        ideal_pct=report.ideal_pct,
        row_layers=report.row_layers,
        row_layers_ideal=report.row_layers_ideal,
        computed_tokens=report.computed_tokens,
        rebuilt_tokens=report.rebuilt_tokens,
        recomputed_tokens=report.recomputed_tokens,
        evicted_full_slots=report.evicted_full_slots,
        evicted_swa_slots=report.evicted_swa_slots,
        retractions=report.retractions,
        leaked_slots=report.leaked_slots,
    )


@lru_cache(maxsize=2)
def _workload(kind: WorkloadKind, system_len: int) -> tuple[Workload, list[TraceRequest]]:
    workload = Workload(kind, system_len, num_requests=16 if kind == "chat" else 64)
    return workload, workload.requests()


def _slots(row: Row, workload: Workload, requests: list[TraceRequest]) -> PoolSlots:
    if row.pools == "ample":
        return ample_pools(requests, page_size=row.page_size, chunk=CHUNK)
    return tight_pools(
        workload,
        page_size=row.page_size,
        window=row.window,
        chunk=CHUNK,
        concurrency=row.concurrency,
    )


def _summary(groups: str, wrong: list[str], slower: list[str]) -> str:
    served = (
        "\n".join(f"- {line}" for line in wrong) or "None: no slot leaked, and every full hit was served."
    )
    work = "\n".join(f"- {line}" for line in slower) or "None."
    return (
        "Work is row-layers as a multiple of the ideal's, which rebuilds nothing. The reference's work is\n"
        "its prefilled tokens times the layers; it has no rows of zipf and few-shot beyond S 2,048, P 1.\n\n"
        f"## Most work in any row\n\n{groups}\n"
        f"## What is wrong\n\n{served}\n\n"
        f"## Rows where the default does more work than the reference's best arm\n\n{work}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
