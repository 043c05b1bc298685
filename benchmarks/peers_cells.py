"""The workloads: what `forkpoint bench` is told for each, and which figures are taken of its answer."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKPOINT = str(Path(sys.executable).with_name("forkpoint"))
# A base model answers /v1/completions on every server; chats are text there, the same for all.
COMMON = ("--endpoint", "completions", "--prompt-format", "text", "--timeout-s", "300")

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a cell. unit: for people. more_is_better: throughput; else it is a time."""

    name: str
    unit: str
    more_is_better: bool
    read: Callable[[Result], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload. title: for people. flags: of `forkpoint bench`, without server and seed."""

    name: str
    title: str
    flags: tuple[str, ...]
    metrics: tuple[Metric, ...]


def _prefill_rate(result: Result) -> float:
    done = [each for each in result["requests"] if each["error"] is None and not each["is_warmup"]]
    return float(statistics.median(each["prompt_tokens"] / each["ttft_s"] for each in done))


def _late_turns_ttft(result: Result) -> float:
    done = [each for each in result["requests"] if each["error"] is None and not each["is_warmup"]]
    return 1e3 * statistics.fmean(each["ttft_s"] for each in done if each["turn"] > 0)


def _figure(name: str) -> Callable[[Result], float]:
    return lambda result: float(result[name])


def _hit_rate(result: Result) -> float:
    rate = result["token_hit_rate"]
    return float("nan") if rate is None else 100 * rate


PREFILL = Metric("prefill", "tok/s", True, _prefill_rate)
TPOT = Metric("tpot", "ms", False, _figure("median_tpot_ms"))
OUTPUT = Metric("output", "tok/s", True, _figure("output_throughput"))
TTFT = Metric("ttft", "ms", False, _figure("mean_ttft_ms"))
HITS = Metric("cached", "%", True, _hit_rate)
LATE_TTFT = Metric("ttft", "ms", False, _late_turns_ttft)
START = Metric("start", "s", False, lambda _: float("nan"))
MEMORY = Metric("memory", "GiB", False, lambda _: float("nan"))


def _alone(tokens: int, output: int, prompts: int) -> tuple[str, ...]:
    flags = ("--workload", "random", "--concurrency", "1", "--warmup-requests", "1")
    return (*flags, *_lengths(0, tokens, output), "--num-prompts", str(prompts))


def _lengths(system: int, question: int, output: int) -> tuple[str, ...]:
    return (
        "--system-tokens", str(system), "--question-tokens", str(question), "--output-tokens", str(output)
    )  # fmt: skip


def _shared(system: int, concurrency: int) -> Cell:
    return Cell(
        f"shared{system}x{concurrency}",
        f"shared {system:,} tokens, {concurrency} at a time",
        ("--workload", "shared-prefix", "--num-prefixes", "1", "--num-prompts", "12",
         "--concurrency", str(concurrency), *_lengths(system, 42, 32)),
        (TTFT, OUTPUT, HITS),
    )  # fmt: skip


CELLS = (
    Cell("prefill1024", "prefill of 1,024 tokens", _alone(1024, 1, 4), (PREFILL,)),
    Cell("prefill4096", "prefill of 4,096 tokens", _alone(4096, 1, 2), (PREFILL,)),
    Cell("stream1", "one stream", _alone(64, 64, 2), (TPOT,)),
    Cell(
        "stream8",
        "8 streams",
        ("--workload", "random", "--concurrency", "8", "--num-prompts", "16", *_lengths(0, 64, 64)),
        (OUTPUT,),
    ),
    _shared(1024, 4),
    _shared(1024, 8),
    _shared(2048, 4),
    _shared(2048, 8),
    Cell(
        "chat",
        "5-turn chat, four conversations: turns 2 to 5",
        ("--workload", "chat", "--turns", "5", "--num-prompts", "4", "--num-prefixes", "1",
         "--concurrency", "4", *_lengths(256, 48, 32)),
        (LATE_TTFT, OUTPUT, HITS),
    ),
)  # fmt: skip


def run_cell(cell: Cell, url: str, tokenizer: Path, seed: int) -> dict[str, float]:
    """The cell's metrics by name. Raises CalledProcessError, or ValueError if requests failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [FORKPOINT, "bench", "--base-url", url, "--seed", str(seed), "--json", str(file)]
        command += ["--tokenizer", str(tokenizer), *COMMON, *cell.flags]
        subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(file.read_bytes())
    if result["failed"]:
        raise ValueError(f"{result['failed']} requests failed: {result['errors']}")
    return {metric.name: metric.read(result) for metric in cell.metrics}
