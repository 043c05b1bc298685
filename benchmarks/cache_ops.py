"""Microseconds of each operation of the prefix cache, beside the reference's two cores.

    python benchmarks/cache_ops.py               all rows; writes benchmarks/results/cache_ops.*
    python benchmarks/cache_ops.py --only match  rows whose name contains `match`; prints only

Thread CPU time, which a busy machine disturbs less. The reference's numbers come from another machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from ops_rows import OPERATIONS
from ops_timing import NUM_REPETITIONS, calibration_us, clock_us

HERE = Path(__file__).parent
REFERENCE_FILE = HERE / "data" / "sglang_0_5_23_ops.csv"
RESULTS = HERE / "results"
PAGE_SIZES = (1, 16)
# Operations that do more than the reference's, with the nearest of its own that they are set beside.
NEAREST = {
    "acquire + release, 16-node chain": "lock + unlock, 16-node chain",
    "acquire + release, 128-node chain": "lock + unlock, 128-node chain",
    "evict 1,024 SWA tokens by cost": "evict 1,024 SWA tokens, tree only, 10k-node forest",
    "evict 16,384 SWA tokens by cost": "evict 16,384 SWA tokens, tree only, 10k-node forest",
}
# What the page calls an operation where the reference's name would mislead.
LABELS = {
    "match, hit, 4,096 tokens, 3-node path": "match, hit, 4,096 tokens, one prompt (1 node; theirs 3)",
    "match, hit, 32,768 tokens, 2-node path": "match, hit, 32,768 tokens, one prompt (1 node; theirs 2)",
    "evict 1,024 SWA tokens, tree only, 10k-node forest": "evict 1,024 SWA tokens, least recently used",
    "evict 16,384 SWA tokens, tree only, 10k-node forest": "evict 16,384 SWA tokens, least recently used",
    "evict 1,024 SWA tokens by cost": "evict 1,024 SWA tokens, by cost (theirs: least recently used)",
    "evict 16,384 SWA tokens by cost": "evict 16,384 SWA tokens, by cost (theirs: least recently used)",
    "acquire + release, 16-node chain": "acquire + release, 16-node chain (theirs: lock + unlock)",
    "acquire + release, 128-node chain": "acquire + release, 128-node chain (theirs: lock + unlock)",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one operation: ours and those of the reference's two cores.

    calibration_us: a fixed piece of work, measured right after it on the same machine.
    """

    operation: str
    page_size: int
    ours_us: float
    calibration_us: float
    python_us: float
    rust_us: float


def main() -> int:
    """Measure, print and, unless a part was chosen, write. Status 1 if a row is slower than their Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this; prints only")
    wanted = parser.parse_args().only

    machine = _machine()
    timings = []
    reference = _read_reference()
    for page_size in PAGE_SIZES:
        for operation, measure in OPERATIONS.items():
            if wanted in operation:
                python_us, rust_us = reference[NEAREST.get(operation, operation), page_size]
                ours_us = round(measure(page_size), 1)
                timings.append(
                    Timing(operation, page_size, ours_us, round(calibration_us(), 1), python_us, rust_us)
                )
                print(_line(timings[-1]), flush=True)
    machine["load average, after"] = _load()
    page = _page(timings, machine)
    print(page)
    if not wanted:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cache_ops.md").write_text(page)
        rows = {"machine": machine, "timings": [asdict(timing) for timing in timings]}
        (RESULTS / "cache_ops.json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(timing.ours_us > timing.python_us for timing in timings))


def _read_reference() -> dict[tuple[str, int], tuple[float, float]]:
    with REFERENCE_FILE.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["operation"], int(row["page_size"])): (float(row["python_us"]), float(row["rust_us"]))
            for row in rows
        }


def _machine() -> dict[str, str]:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
        "Python, numpy": f"{platform.python_version()}, {np.__version__}",
        "reading the clock": f"{clock_us():.1f} us, part of each insert and eviction",
        "load average, before": _load(),
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _line(timing: Timing) -> str:
    theirs = [f"{timing.python_us:,.1f}", f"{timing.rust_us:,.1f}"]
    theirs += [f"{timing.ours_us / each:.2f}" for each in (timing.python_us, timing.rust_us)]
    label = LABELS.get(timing.operation, timing.operation)
    ours = [f"{timing.ours_us:,.1f}", f"{timing.calibration_us:.0f}"]
    return f"| {' | '.join([label, str(timing.page_size), *ours, *theirs])} |"


def _page(timings: list[Timing], machine: dict[str, str]) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    lines = "\n".join(map(_line, timings))
    return f"""# Cost of the cache's operations

Microseconds of thread CPU time, medians of {NUM_REPETITIONS} repetitions (insert, evict: of the single
calls), W = 512, default policies where no other is named. `python benchmarks/cache_ops.py` on:

{facts}

Python, Rust: the two cores of SGLang 0.5.23, from `benchmarks/data/sglang_0_5_23_ops.csv`. They were measured
on another machine, at a load average of 5 to 9: the ratios (ours / theirs, below 1 is faster) are indicative.
Calibration: microseconds of a fixed piece of work (`ops_timing.py`) right after each row, by which two runs
can be compared. Busy neighbours slow a row down and its calibration alike.

| operation | P | ours us | calibration | Python us | Rust us | ours / Python | ours / Rust |
|---|---|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    raise SystemExit(main())
