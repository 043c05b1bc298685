"""Measures the settings that a CPU server is tuned with, each value in a process of its own, in turn.

    .venv/bin/python benchmarks/tuning.py [--rounds 3] [--only chunk page] [--save]

Per value, on the demo model: a prefill of 4,096 tokens; the longest step that a running stream waits through
meanwhile; the time of a step of one and of eight streams at 1,024 tokens; the time to first token of a
question of 64 tokens on a cached prompt of 2,048. Threads are counted for the engine alone; the API process
is not part of it. Pool sizes are replayed without a model (`forkpoint simulate`). --save writes
benchmarks/results/tuning.{json,md}, which docs/performance.md quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
LONG = 4096
SHARED = 2048
QUESTION = 64
STREAM = 1024
DECODE_STEPS = 12


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of one flag. flags: fields of EngineConfig. num_threads: None: as the server chooses."""

    group: str
    value: str
    flags: Mapping[str, int | str]
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What one process measured. stall_ms: the longest step while a stream runs and a prefill goes on."""

    prefill_tok_s: float
    stall_ms: float
    step1_ms: float
    step8_ms: float
    hit_ttft_ms: float


SETTINGS = (
    *(Setting("chunk", str(rows), {"chunked_prefill_size": rows}) for rows in (128, 256, 512, 1024, 2048)),
    *(Setting("page", str(size), {"page_size": size}) for size in (1, 4, 16, 64)),
    *(Setting("threads", str(count), {}, num_threads=count) for count in (1, 2)),
    Setting("weights", "float32", {"dtype": "float32"}),
    Setting("weights", "bfloat16", {"dtype": "bfloat16"}),
    Setting("weights", "int8", {"dtype": "bfloat16", "quantization": "int8"}),
)
UNITS = {
    "prefill_tok_s": "prefill of 4,096, tok/s",
    "stall_ms": "longest step beside it, ms",
    "step1_ms": "step of 1 stream, ms",
    "step8_ms": "step of 8 streams, ms",
    "hit_ttft_ms": "64 new on 2,048 cached, ms",
}
# Slots of the sliding-window pool, as windows of 512 beside those of the eight running requests.
SWA_WINDOWS = (0, 4, 8, 16, 32, 64)
WORKLOADS: Mapping[str, Sequence[str]] = {
    "8 prompts of 2,048, 64 requests": ("--workload", "groups", "--system", "2048"),
    "16 chats of 4 turns": ("--workload", "chat", "--system", "2048"),
}


def measure(setting: Setting) -> Figures:
    """Build an engine with this setting, here, and time it."""
    from engine_bench import EngineBench

    bench = EngineBench(setting.flags, num_threads=setting.num_threads)
    bench.time_to_first_token(bench.prompt(STREAM))  # the first of its shapes pays for set-up
    prefill_s = min(bench.time_to_first_token(bench.prompt(LONG)) for _ in range(2))
    shared = bench.prompt(SHARED)
    bench.time_to_first_token(shared + bench.prompt(QUESTION))
    hits = [bench.time_to_first_token(shared + bench.prompt(QUESTION)) for _ in range(5)]
    return Figures(
        prefill_tok_s=LONG / prefill_s,
        stall_ms=1e3 * max(bench.steps_beside_prefill(bench.prompt(STREAM), bench.prompt(LONG))),
        step1_ms=1e3 * statistics.median(bench.decode_steps([bench.prompt(STREAM)], DECODE_STEPS)),
        step8_ms=1e3
        * statistics.median(bench.decode_steps([bench.prompt(STREAM) for _ in range(8)], DECODE_STEPS)),
        hit_ttft_ms=1e3 * statistics.median(hits),
    )


def in_child(index: int) -> Figures:
    """measure(SETTINGS[index]) in a process of its own: threads and memory start afresh."""
    child = subprocess.run(
        [sys.executable, __file__, "--child", str(index)], check=True, capture_output=True, text=True
    )
    return Figures(**json.loads(child.stdout.splitlines()[-1]))


def replay(workload: Sequence[str], windows: int) -> dict[str, float]:
    """Served share and work with room for so many kept windows."""
    window, margin, page, running, chunk = 512, 16, 16, 8, 512
    per_window = window + margin + 2 * page
    command = [str(Path(sys.executable).with_name("forkpoint")), "simulate", *workload, "--json"]
    command += ["--page-size", str(page), "--window", str(window), "--chunk", str(chunk)]
    command += ["--concurrency", str(running), "--swa-slots", str(chunk + per_window * (running + windows))]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "served_pct": report["served_pct"],
        "work": report["row_layers"] / report["row_layers_ideal"],
        "rebuilt_tokens": report["rebuilt_tokens"],
    }


def as_markdown(
    figures: Mapping[int, Sequence[Figures]], replays: Mapping[str, Sequence[dict[str, float]]], machine: str
) -> str:
    lines = ["# Settings of a CPU server", "", "Demo model (Gemma 3 270M), bfloat16 but where said."]
    lines += ["Made by `.venv/bin/python benchmarks/tuning.py --save`.", "", f"{machine}.", ""]
    for group in dict.fromkeys(SETTINGS[index].group for index in figures):
        lines += [f"| {group} | {' | '.join(UNITS.values())} |", "|---" * (len(UNITS) + 1) + "|"]
        for index, runs in figures.items():
            if SETTINGS[index].group == group:
                cells = [_spread([getattr(run, field) for run in runs]) for field in UNITS]
                lines.append(f"| {SETTINGS[index].value} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["Each cell: median of the rounds (least to most).", ""]
    if replays:
        lines += [
            "Windows of 512 that the sliding-window pool has room for beside eight running requests:",
            "",
        ]
        lines += ["| workload | " + " | ".join(map(str, SWA_WINDOWS)) + " |"]
        lines += ["|---" * (len(SWA_WINDOWS) + 1) + "|"]
        for name, row in replays.items():
            cells = [f"{cell['served_pct']:.1f} %, {cell['work']:.2f}" for cell in row]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += ["", "Share of the prompts served from the cache, and work against a cache without limits."]
    return "\n".join(lines) + "\n"


def _spread(numbers: Sequence[float]) -> str:
    digits = 0 if min(numbers) >= 100 else 1
    median, least, most = statistics.median(numbers), min(numbers), max(numbers)
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = [*dict.fromkeys(setting.group for setting in SETTINGS), "pools"]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(asdict(measure(SETTINGS[arguments.child]))))
        return
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the engine process sets it
    wanted = [index for index, setting in enumerate(SETTINGS) if setting.group in arguments.only]
    figures: dict[int, list[Figures]] = {index: [] for index in wanted}
    for round_number in range(arguments.rounds):
        # Another order each round: what drifts must not favour one value.
        for index in wanted[round_number:] + wanted[:round_number]:
            figures[index].append(in_child(index))
            setting = SETTINGS[index]
            print(f"round {round_number + 1}: {setting.group} {setting.value}", flush=True)
    replays = {}
    if "pools" in arguments.only:
        replays = {name: [replay(row, windows) for windows in SWA_WINDOWS] for name, row in WORKLOADS.items()}

    from machine import machine_line

    text = as_markdown(figures, replays, machine_line())
    print(text)
    if arguments.save:
        (RESULTS / "tuning.md").write_text(text, encoding="utf-8")
        saved = {
            "machine": machine_line(),
            "settings": [
                {**asdict(SETTINGS[index]), "runs": [asdict(run) for run in runs]}
                for index, runs in figures.items()
            ],
            "pools": {"windows": SWA_WINDOWS, **replays},
        }
        (RESULTS / "tuning.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
