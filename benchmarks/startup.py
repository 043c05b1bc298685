"""Measures how long `forkpoint serve` takes until it is ready, and where the time goes.

    .venv/bin/python benchmarks/startup.py [--model demo] [--repeats 7] [--save]

Starts the server `repeats` times, one after the other, and reads the stages from its own log line
(`start_took`); wall is the time between starting the command and reading that line. One start before them is
not counted: it converts a GGUF file where that was not done, and brings all files into the page cache.

The engine's stages run beside those of the API process, which waits for it at the end. --save writes
benchmarks/results/startup.{json,md}. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine_line

RESULTS = Path(__file__).with_name("results")
FORKPOINT = Path(sys.executable).with_name("forkpoint")


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds: from outside, as the server says, and by stage of its two processes."""

    wall_s: float
    ready_s: float
    stages: dict[str, float]
    engine_stages: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    one_start(arguments.model)
    starts = [one_start(arguments.model) for _ in range(arguments.repeats)]
    print(table(starts))
    if arguments.save:
        save(starts, arguments.model)


def one_start(model: str) -> Start:
    """Start a server, and end it as soon as it is ready."""
    began_s = time.perf_counter()
    with subprocess.Popen(
        [FORKPOINT, "serve", model, "--port", "0", "--log-format", "json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if not line.startswith("{"):
                    continue
                event = json.loads(line)
                if event["event"] == "start_took":
                    wall_s = round(time.perf_counter() - began_s, 2)
                    return Start(wall_s, event["ready_s"], event["stages"], event["engine_stages"])
        finally:
            process.terminate()
            process.communicate()
    raise SystemExit(f"the server ended with status {process.returncode} before it was ready")


def table(starts: Sequence[Start]) -> str:
    """One line for the whole and for each stage: the median, the least and the most of all starts."""
    lines = ["| stage | median s | least | most | of the whole |", "|:--|--:|--:|--:|--:|"]
    wall_s = statistics.median(start.wall_s for start in starts)
    rows = [("**wall**", [start.wall_s for start in starts])]
    rows += [(name, [start.stages.get(name, 0.0) for start in starts]) for name in starts[0].stages]
    rows += [
        (f"engine: {name}", [start.engine_stages.get(name, 0.0) for start in starts])
        for name in starts[0].engine_stages
    ]
    for name, seconds in rows:
        median_s = statistics.median(seconds)
        cells = [name, *(f"{value:.2f}" for value in (median_s, min(seconds), max(seconds)))]
        lines.append(f"| {' | '.join(cells)} | {median_s / wall_s:.0%} |")
    return "\n".join(lines)


def save(starts: Sequence[Start], model: str) -> None:
    machine = machine_line()
    text = (
        "# From the command to ready\n\n"
        f"`benchmarks/startup.py --model {model}`, {len(starts)} starts from a warm page cache. {machine}.\n"
        "Stages of the API process follow each other; the engine's run beside the later ones.\n\n"
        f"{table(starts)}\n"
    )
    RESULTS.joinpath("startup.md").write_text(text, encoding="utf-8")
    record = {"machine": machine, "model": model, "starts": [asdict(start) for start in starts]}
    RESULTS.joinpath("startup.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
