"""Measures how many threads the engine should compute with, and how long they should spin at barriers.

    .venv/bin/python benchmarks/threads.py [--model demo] [--streams 1 8 32] [--repeats 5] [--save]

Starts `forkpoint serve` for each setting, opens streams of long answers, and reads the server's own count of
generated tokens and the processor time of both of its processes at the start and the end of a window.
Settings alternate within each repeat. Beside the server run only the clients, which read and throw away.

threads: --threads. spin: GOMP_SPINCOUNT, turns of the loop in which a thread waits at a barrier before it
sleeps; 300000 is what libgomp does by itself. Best is the fastest window: on a machine with other work, the
one that says most. --save writes benchmarks/results/threads.{json,md}. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from machine import machine_line

from forkpoint.configs.cores import num_usable_cores

RESULTS = Path(__file__).with_name("results")
FORKPOINT = Path(sys.executable).with_name("forkpoint")
PATIENCE_S = 180.0
GENERATED = b"forkpoint_generation_tokens_total "


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine's threads are set: their number, and GOMP_SPINCOUNT."""

    threads: int
    spin: int

    @property
    def name(self) -> str:
        return f"{self.threads} threads, spin {self.spin}"


@dataclass(frozen=True, slots=True)
class Window:
    """One window: tokens per second, and processor time per token of the engine and of the API process."""

    tokens_per_s: float
    engine_us: float
    api_us: float


Samples = dict[tuple[Setting, int], list[Window]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", help="default: all cores, and one less")
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 2000, 10_000, 300_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    cores = num_usable_cores()
    counts = arguments.threads or sorted({cores, max(1, cores - 1)})
    # One thread meets nobody at barriers.
    settings = [
        Setting(count, spin) for count in counts for spin in (arguments.spins if count > 1 else [2000])
    ]
    samples: Samples = {}
    for _ in range(arguments.repeats):
        for setting in settings:
            measure(arguments.model, setting, arguments.streams, arguments.seconds, samples)
    print(table(samples))
    if arguments.save:
        save(samples, arguments.model)


def measure(model: str, setting: Setting, streams: Sequence[int], window_s: float, samples: Samples) -> None:
    """One window for each number of streams, in one new server."""
    with server(model, setting, max(streams)) as (api, port):
        asyncio.run(wait_ready(port))
        engine = max(api.children(), key=_resident_bytes)  # the one with the model in memory
        for count in streams:
            window = asyncio.run(one_window(port, count, window_s, api, engine))
            samples.setdefault((setting, count), []).append(window)


def _resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


@contextlib.contextmanager
def server(model: str, setting: Setting, max_running: int) -> Iterator[tuple[psutil.Process, int]]:
    """A `forkpoint serve` and its port."""
    flags = ["--port", "0", "--threads", str(setting.threads), "--max-running-requests", str(max_running)]
    with subprocess.Popen(
        [FORKPOINT, "serve", model, *flags, "--log-format", "json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GOMP_SPINCOUNT": str(setting.spin)},
    ) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
            url = next(line["url"] for line in lines if line["event"] == "listening")
            yield psutil.Process(process.pid), int(url.rpartition(":")[2])
        finally:
            process.terminate()
            process.communicate()


async def one_window(
    port: int, count: int, window_s: float, api: psutil.Process, engine: psutil.Process
) -> Window:
    async with contextlib.AsyncExitStack() as stack:
        for index in range(count):
            await stack.enter_async_context(open_stream(port, index))
        first = await num_generated(port)
        while await num_generated(port) < first + 4 * count:  # until all of them decode
            await asyncio.sleep(0.05)
        tokens, started_s = await num_generated(port), time.perf_counter()
        cpu_s = [_cpu_s(api), _cpu_s(engine)]
        await asyncio.sleep(window_s)
        tokens, lasted_s = await num_generated(port) - tokens, time.perf_counter() - started_s
        api_s, engine_s = _cpu_s(api) - cpu_s[0], _cpu_s(engine) - cpu_s[1]
    return Window(
        round(tokens / lasted_s, 1), round(1e6 * engine_s / tokens, 1), round(1e6 * api_s / tokens, 1)
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def open_stream(port: int, index: int) -> AsyncIterator[None]:
    """A stream of an answer that does not end by itself; closed at the end."""
    body = json.dumps(
        {"prompt": f"{index} bottles of", "stream": True, "ignore_eos": True, "max_tokens": 20_000}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        while await reader.read(65536):
            pass

    task = asyncio.create_task(read())
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield
    finally:
        writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def num_generated(port: int) -> int:
    """Tokens that the server has generated so far, as it counts them itself."""
    answer = await get(port, "/metrics")
    (line,) = (line for line in answer.splitlines() if line.startswith(GENERATED))
    return int(float(line.removeprefix(GENERATED)))


async def wait_ready(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while b" 200 " not in (await get(port, "/ready")).partition(b"\r\n")[0]:
        assert time.monotonic() < deadline, "the server did not become ready"
        await asyncio.sleep(0.1)


async def get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


def table(samples: Samples) -> str:
    """One line for each setting and number of streams."""
    lines = [
        "| streams | threads | spin | tok/s, best | median | least | engine CPU ms/token, least "
        "| API CPU us/token, least |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (setting, count), windows in sorted(samples.items(), key=lambda entry: entry[0][1]):
        rates = [window.tokens_per_s for window in windows]
        engine_ms = min(window.engine_us for window in windows) / 1e3
        cells = [str(count), str(setting.threads), str(setting.spin)]
        cells += [f"{rate:.0f}" for rate in (max(rates), statistics.median(rates), min(rates))]
        cells += [f"{engine_ms:.2f}", f"{min(window.api_us for window in windows):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save(samples: Samples, model: str) -> None:
    machine = machine_line()
    repeats = min(map(len, samples.values()))
    text = (
        "# Threads of the engine beside the API process\n\n"
        f"`benchmarks/threads.py --model {model}`, {repeats} windows each. {machine}.\n\n{table(samples)}\n"
    )
    RESULTS.joinpath("threads.md").write_text(text, encoding="utf-8")
    rows = [
        {"setting": asdict(setting), "streams": count, "windows": [asdict(window) for window in windows]}
        for (setting, count), windows in samples.items()
    ]
    record = {"machine": machine, "model": model, "rows": rows}
    RESULTS.joinpath("threads.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
