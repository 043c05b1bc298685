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
# What the page calls an operation where the reference's name would mislead.
LABELS = {
    "match, hit, 4,096 tokens, 3-node path": "match, hit, 4,096 tokens, one prompt (1 node; theirs 3)",
    "match, hit, 32,768 tokens, 2-node path": "match, hit, 32,768 tokens, one prompt (1 node; theirs 2)",
    "lock + unlock, 16-node chain": "acquire + release, 16-node chain (theirs: lock + unlock)",
    "lock + unlock, 128-node chain": "acquire + release, 128-node chain (theirs: lock + unlock)",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one operation: ours and, where it measured the same, those of the reference's cores."""

    operation: str
    page_size: int
    ours_us: float
    python_us: float | None
    rust_us: float | None


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
                python_us, rust_us = reference.get((operation, page_size), (None, None))
                timing = Timing(operation, page_size, round(measure(page_size), 1), python_us, rust_us)
                timings.append(timing)
                print(_line(timing), flush=True)
    machine |= {"calibration after": f"{calibration_us():.1f} us", "load average after": _load()}
    page = _page(timings, machine)
    print(page)
    if not wanted:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cache_ops.md").write_text(page)
        rows = {"machine": machine, "timings": [asdict(timing) for timing in timings]}
        (RESULTS / "cache_ops.json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(timing.python_us is not None and timing.ours_us > timing.python_us for timing in timings))


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
        "calibration": f"{calibration_us():.1f} us",
        "reading the clock": f"{clock_us():.1f} us",
        "load average": _load(),
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _line(timing: Timing) -> str:
    theirs = ["-", "-", "-", "-"]
    if timing.python_us is not None and timing.rust_us is not None:
        theirs = [f"{timing.python_us:,.1f}", f"{timing.rust_us:,.1f}"]
        theirs += [f"{timing.ours_us / each:.2f}" for each in (timing.python_us, timing.rust_us)]
    label = LABELS.get(timing.operation, timing.operation)
    return f"| {' | '.join([label, str(timing.page_size), f'{timing.ours_us:,.1f}', *theirs])} |"


def _page(timings: list[Timing], machine: dict[str, str]) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    lines = "\n".join(map(_line, timings))
    return f"""# Cost of the cache's operations

Microseconds of thread CPU time, medians of {NUM_REPETITIONS} repetitions (evictions and single calls: of all calls), W = 512,
default policies. `python benchmarks/cache_ops.py` on:

{facts}

Python, Rust: the two cores of SGLang 0.5.23, from `benchmarks/data/sglang_0_5_23_ops.csv`. They were measured
on another machine under another, unknown load, so the ratios (ours / theirs, below 1 is faster) are indicative.
Calibration is the time of a fixed piece of work (`ops_timing.py`), for comparing machines.

| operation | P | ours us | Python us | Rust us | ours / Python | ours / Rust |
|---|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    raise SystemExit(main())
