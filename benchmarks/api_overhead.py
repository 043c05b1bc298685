"""Measures what a streamed token costs the API process in processor time, at 1, 8 and 64 streams at once.

    .venv/bin/python benchmarks/api_overhead.py [--streams 1 8 64] [--repeats 5] [--seconds 4] [--save]

The API process is `run_server` with the real engine client, pipe, tokenizer and HTTP; the engine is a process
that sends ready-made steps at a fixed pace, one token per stream and step. The load comes from this process:
chats in streams that stay open while the processor time (user and system) of the API process is read at the
start and the end of a window. So what is counted is the steady state: taking steps from the pipe, text,
metrics, JSON, the socket. Every token is one letter, and letters are counted, so merged tokens count too.
--save writes benchmarks/results/. Run it on a machine with two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import pickle
import statistics
import string
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import tokenizers
from machine import machine_line
from tokenizers import decoders, models

from forkpoint.configs.serving import EngineConfig, ServerConfig
from forkpoint.scheduler.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Finish,
    Ready,
    Shutdown,
    Started,
    StepTokens,
    Submit,
)
from forkpoint.scheduler.process_client import ProcessEngine
from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.listener import bind_listener
from forkpoint.server.run import run_server
from forkpoint.server.text import Tokenizer

RESULTS = Path(__file__).with_name("results")
STEP_S = 0.025
LETTERS = string.ascii_letters
VOCABULARY = LETTERS + ":\n<>"
MODEL = "letters"
TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}assistant:"
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number of streams. us_per_token: of each repeat. tokens: of one repeat, as a median."""

    streams: int
    us_per_token: tuple[float, ...]
    tokens: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.us_per_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the API process here")
    arguments = parser.parse_args()
    rows = measure(arguments.streams, arguments.repeats, arguments.seconds, arguments.profile)
    print(table(rows))
    if arguments.save:
        save(rows)


def measure(streams: Sequence[int], repeats: int, window_s: float, profile: Path | None = None) -> list[Row]:
    """Every number of streams `repeats` times, alternating, against one server."""
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(Path(directory))
        listener = bind_listener("127.0.0.1", 0)
        port = listener.getsockname()[1]
        listener.close()
        context = multiprocessing.get_context("spawn")
        # Not a daemon: those may not have children, and the engine is one.
        api = context.Process(target=serve_api, args=(Path(directory), port, profile))
        api.start()
        assert api.pid is not None
        try:
            process = psutil.Process(api.pid)
            asyncio.run(wait_ready(port))
            samples: dict[int, list[tuple[float, int]]] = {count: [] for count in streams}
            for _ in range(repeats):
                for count in streams:
                    samples[count].append(asyncio.run(one_window(process, port, count, window_s)))
        finally:
            api.terminate()
            api.join(PATIENCE_S)
    return [
        Row(
            count,
            tuple(round(1e6 * cpu_s / tokens, 2) for cpu_s, tokens in samples[count]),
            int(statistics.median(tokens for _, tokens in samples[count])),
        )
        for count in streams
    ]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| streams | us of CPU per token, median | least | most | tokens per run |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        low, high = min(row.us_per_token), max(row.us_per_token)
        lines.append(f"| {row.streams} | {row.median_us:.1f} | {low:.1f} | {high:.1f} | {row.tokens} |")
    return "\n".join(lines)


def save(rows: Sequence[Row]) -> None:
    machine = machine_line()
    repeats = len(rows[0].us_per_token)
    text = (
        "# Processor time of the API process per streamed token\n\n"
        f"`benchmarks/api_overhead.py`, {repeats} runs each, a step every {1e3 * STEP_S:g} ms. {machine}.\n\n"
        f"{table(rows)}\n"
    )
    RESULTS.joinpath("api_overhead.md").write_text(text, encoding="utf-8")
    record = {"machine": machine, "step_s": STEP_S, "rows": [asdict(row) for row in rows]}
    RESULTS.joinpath("api_overhead.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# ---- the load


async def wait_ready(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError("the server did not become ready")


async def one_window(process: psutil.Process, port: int, count: int, window_s: float) -> tuple[float, int]:
    """Processor seconds of the API process, and tokens that reached the clients, in one window."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(open_stream(port)) for _ in range(count)]
        while min(map(len, streams)) < 2000:  # bytes: some ten tokens of each
            await asyncio.sleep(0.05)
        begin, cpu_begin = num_letters(streams), process.cpu_times()
        await asyncio.sleep(window_s)
        end, cpu_end = num_letters(streams), process.cpu_times()
    return cpu_end.user + cpu_end.system - cpu_begin.user - cpu_begin.system, end - begin


@contextlib.asynccontextmanager
async def open_stream(port: int) -> AsyncIterator[bytearray]:
    """All bytes that one streaming chat has received so far; grows by itself."""
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": True, "ignore_eos": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    received = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def receive() -> None:
        while piece := await reader.read(65536):
            received.extend(piece)

    task = asyncio.create_task(receive())
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield received
    finally:
        writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def num_letters(streams: Sequence[bytearray]) -> int:
    """Letters in all `content` fields so far; one token is one letter."""
    total = 0
    for received in streams:
        pieces = bytes(received).split(b'"content":"')[1:]
        total += sum(piece.find(b'"') for piece in pieces if b'"' in piece)
    return total


# ---- the API process


def serve_api(directory: Path, port: int, profile: Path | None) -> None:
    """Serve until SIGTERM."""
    engine = ProcessEngine(EngineConfig(model_dir=directory), entry=serve_steps)
    config = ServerConfig((MODEL,), port=port, log_level="warning", shutdown_timeout_s=1.0)
    template = ChatTemplate.load(directory, None)
    tokenizer = Tokenizer.load(directory)
    if profile is None:
        run_server(config, engine, tokenizer, template)
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.runcall(run_server, config, engine, tokenizer, template)
    profiler.dump_stats(profile)


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of one letter per token, and a chat template."""
    vocabulary = {letter: index for index, letter in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


# ---- the engine process


def serve_steps(_: EngineConfig, inbox: Connection, outbox: Connection) -> None:
    """Entry point: a token for every sequence at each tick, until told to end."""
    outbox.send_bytes(pickle.dumps(Ready(_INFO), protocol=pickle.HIGHEST_PROTOCOL))
    left: dict[int, int] = {}
    num_steps = 0
    next_step = time.monotonic()
    while True:
        started: list[Started] = []
        finished: list[Finish] = []
        while inbox.poll(None if not left and not started else max(0.0, next_step - time.monotonic())):
            match pickle.loads(inbox.recv_bytes()):
                case Submit(uid=uid, params=params):
                    left[uid] = params.max_tokens
                    started.append(Started(uid, 0, 0, 0.0))
                case Abort(uid=uid):
                    if left.pop(uid, None) is not None:
                        finished.append(Finish(uid, "abort"))
                case Shutdown():
                    return
        next_step = max(next_step + STEP_S, time.monotonic())
        num_steps += 1
        uids = list(left)
        for uid in uids:
            left[uid] -= 1
            if left[uid] == 0:
                del left[uid]
                finished.append(Finish(uid, "length"))
        step = StepTokens(
            uids=uids,
            tokens=[(num_steps + index) % len(LETTERS) for index in range(len(uids))],
            started=tuple(started),
            finished=tuple(finished),
            stats=EngineStats(running=len(left), num_steps=num_steps),
            step_s=STEP_S,
            num_decode_rows=len(uids),
        )
        outbox.send_bytes(pickle.dumps(step, protocol=pickle.HIGHEST_PROTOCOL))


_INFO = EngineInfo(
    context_length=1_000_000,
    vocab_size=len(VOCABULARY),
    page_size=16,
    full_tokens=0,
    swa_tokens=0,
    window=None,
    margin=0,
    max_running_requests=256,
    chunked_prefill_size=512,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    layer_pattern="F",
    num_parameters=0,
)


if __name__ == "__main__":
    main()
