"""Two hundred streams at once, among them clients that leave, read slowly or send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.health_probe import HealthTimes, probing_health
from support.http_server import error_of
from support.near_ties import differ_beyond_ties
from support.served import ServedModel, serve_ready
from support.tiny_models import NUM_SPECIAL, VOCAB_SIZE

from forkpoint.server.text import Tokenizer

NUM_STREAMS = 200
MAX_TOKENS = 24
PATIENCE_S = 120.0
HEALTH_LIMIT_S = 0.1
# A storm may be told from a leak only by its growth: one that keeps what its 200 requests hold (buffers of
# 64 KiB and more, tokens, frames) would grow by more each time.
MAX_GROWTH_BYTES = 16 * 2**20
POOLS = ("--page-size", "4", "--max-total-tokens", "16000", "--swa-total-tokens", "8000")
FLAGS = (*POOLS, "--max-running-requests", "64")


@dataclass(frozen=True, slots=True)
class Expected:
    """One greedy request, and the text that it has alone."""

    prompt: tuple[int, ...]
    text: str


@pytest.fixture(scope="module")
def served(letters_dir: Path) -> Iterator[ServedModel]:
    with serve_ready(letters_dir, *FLAGS) as served:
        yield served


@pytest.fixture(scope="module")
def expected(served: ServedModel) -> list[Expected]:
    rng = random.Random(7)
    shared = [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(60)]
    answers = []
    for _ in range(16):
        prompt = shared[: rng.randint(0, 60)] + [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(20)]
        text = served.text(prompt, **_options(MAX_TOKENS))
        answers.append(Expected(tuple(prompt), text))
    return answers


def test_storm_changes_no_answer_leaks_no_page_and_leaves_health_quick(
    served: ServedModel, expected: list[Expected], letters_dir: Path
) -> None:
    process = psutil.Process(served.process.pid)
    asyncio.run(Storm(served.url, expected, seed=0).run())  # buffers and caches reach their size
    served.flush()
    before = process.memory_info().rss

    def storm(seed: int) -> HealthTimes:
        with probing_health(served.url) as times:
            texts = asyncio.run(Storm(served.url, expected, seed=seed).run())
        assert set(times.statuses) == {200}
        assert len(texts) > NUM_STREAMS / 3
        _require_equal(texts, letters_dir)
        served.flush()
        return times

    _require_quick_health(storm, 3)
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES


def test_large_bodies_at_once_leave_health_quick(served: ServedModel) -> None:
    """30 MB of brackets, keys, numbers and text, six at a time: each held the event loop for a second."""
    size = 30_000_000
    bodies = {
        "brackets": b'{"messages": [' + b"[]," * (size // 3) + b"[]]}",
        "keys": b'{"logit_bias": {' + b",".join(b'"%x": 1' % i for i in range(size // 12)) + b"}}",
        "numbers": b'{"prompt": [' + b"7," * 900_000 + b"7]}",
        "prompts": b'{"prompt": [' + b"[7]," * 300_000 + b"[7]]}",
        "messages": b'{"messages": [' + b"1," * 900_000 + b"1]}",
        "parts": b'{"messages": [{"role": "user", "content": [' + b"1," * 900_000 + b"1]}]}",
        "text": b'{"prompt": "' + b"x" * size + b'"}',
        "escapes": b'{"prompt": "' + b"\\n" * (size // 2) + b'"}',
        "stop": b'{"prompt": "a", "stop": "' + "é".encode() * (size // 2) + b'"}',
        "model": b'{"prompt": "a", "model": "' + b"x" * size + b'"}',
    }

    async def send(path: str, body: bytes) -> int | None:
        """The status; None if the server had ended the connection before all was sent."""
        reader, writer = await _post(served.url, path, body)
        try:
            return int((await reader.readline()).split()[1])
        except ConnectionError:
            return None
        finally:
            writer.transport.abort()

    async def send_all() -> list[int | None]:
        limit = asyncio.Semaphore(6)

        async def send_one(body: bytes) -> int | None:
            async with limit:
                return await send(
                    "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions", body
                )

        return await asyncio.gather(*[send_one(body) for body in bodies.values()])

    def attack(_: int) -> HealthTimes:
        with probing_health(served.url) as times:
            statuses = asyncio.run(send_all())
        for name, status in zip(bodies, statuses, strict=True):
            assert status in (400, 404, 413, 429, None), (name, status)
        assert any(statuses)
        return times

    _require_quick_health(attack, 3)


def test_dead_engine_ends_all_streams_at_once_and_serves_again(
    letters_dir: Path, expected: list[Expected]
) -> None:
    # Room for all streams at once, so that none waits for the end of another.
    pools = ("--max-total-tokens", "100000", "--swa-total-tokens", "20000")
    with serve_ready(letters_dir, *pools, "--max-running-requests", "64") as served:
        asyncio.run(_kill_engine_below(served))
        refusal = served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert error_of(refusal, 503)["code"] == "service_unavailable"
        assert int(refusal.headers["retry-after"]) > 0
        served.wait_ready()
        texts = asyncio.run(Storm(served.url, expected, seed=3).run())
        _require_equal(texts, letters_dir)
        served.flush()


async def _kill_engine_below(served: ServedModel) -> None:
    """Kill it when all streams run; each must end with an error event within a second."""
    async with contextlib.AsyncExitStack() as stack:
        body = {"prompt": "hold on", "stream": True, **_options(3000)}
        streams = [await stack.enter_async_context(_streaming(served.url, body)) for _ in range(40)]
        for stream in streams:
            await stream.next_event()
        os.kill(served.engine_process_id(), signal.SIGKILL)
        killed_at = time.monotonic()
        for last in await asyncio.gather(*[stream.last_event() for stream in streams]):
            assert json.loads(last)["error"]["type"] == "server_error"
        assert time.monotonic() - killed_at < 1.0


class Storm:
    """One round of NUM_STREAMS clients at once; the seed says who does what."""

    def __init__(self, url: str, expected: list[Expected], *, seed: int) -> None:
        self._url = url
        self._expected = expected
        self._rng = random.Random(seed)
        self._others_are_done = asyncio.Event()

    async def run(self) -> list[tuple[Expected, str]]:
        """What well-behaved clients got, beside what they should have got."""
        kinds = self._rng.choices(
            [self._read, self._read_slowly, self._leave, self._send_nonsense, self._ask_whole],
            weights=[10, 2, 4, 2, 2],
            k=NUM_STREAMS,
        )
        slow = [asyncio.create_task(kind()) for kind in kinds if kind == self._read_slowly]
        others = [asyncio.create_task(kind()) for kind in kinds if kind != self._read_slowly]
        results = await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S)
        self._others_are_done.set()
        results += await asyncio.wait_for(asyncio.gather(*slow), PATIENCE_S)
        return [result for result in results if result is not None]

    def _request(self) -> tuple[Expected, dict[str, object]]:
        expected = self._rng.choice(self._expected)
        return expected, {"prompt": list(expected.prompt), "stream": True, **_options(MAX_TOKENS)}

    async def _read(self) -> tuple[Expected, str]:
        expected, body = self._request()
        async with _streaming(self._url, body) as stream:
            return expected, await stream.text()

    async def _read_slowly(self) -> tuple[Expected, str]:
        """Reads nothing until everybody else is done."""
        expected, body = self._request()
        async with _streaming(self._url, body, receive_buffer=2048) as stream:
            await self._others_are_done.wait()
            return expected, await stream.text()

    async def _leave(self) -> None:
        expected, body = self._request()
        async with _streaming(self._url, {**body, "max_tokens": 500}) as stream:
            for _ in range(self._rng.randint(0, 10)):
                await stream.next_event()

    async def _send_nonsense(self) -> None:
        faults = [
            b"{",
            b'{"prompt": [-1]}',
            b'{"prompt": "a", "n": 0}',
            b'{"prompt": "a", "temperature": NaN}',
        ]
        reader, writer = await _post(self._url, "/v1/completions", self._rng.choice(faults))
        assert b" 400 " in await reader.readline()
        writer.close()

    async def _ask_whole(self) -> tuple[Expected, str]:
        expected, body = self._request()
        reader, writer = await _post(
            self._url, "/v1/completions", json.dumps({**body, "stream": False}).encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        answer = json.loads(await reader.readexactly(length))
        writer.close()
        return expected, answer["choices"][0]["text"]


class _Stream:
    """A streamed completion, read event by event."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next_event(self) -> bytes:
        """What stands behind `data: `. Fails at the end of the connection."""
        while not (line := await self._reader.readline()).startswith(b"data: "):
            assert line, "the connection ended within the stream"
        return line.removeprefix(b"data: ").strip()

    async def last_event(self) -> bytes:
        last = b""
        while (event := await self.next_event()) != b"[DONE]":
            last = event
        return last

    async def text(self) -> str:
        """All of it; every event must be a good one."""
        texts = []
        while (event := await self.next_event()) != b"[DONE]":
            texts.append(json.loads(event)["choices"][0]["text"])
        return "".join(texts)


@contextlib.asynccontextmanager
async def _streaming(
    url: str, body: dict[str, object], receive_buffer: int | None = None
) -> AsyncIterator[_Stream]:
    reader, writer = await _post(url, "/v1/completions", json.dumps(body).encode(), receive_buffer)
    try:
        yield _Stream(reader)
    finally:
        writer.transport.abort()


async def _post(
    url: str, path: str, body: bytes, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    limit = 2**16 if receive_buffer is None else receive_buffer
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    with contextlib.suppress(ConnectionError):  # refused before it was sent to its end; the answer is there
        await writer.drain()
    return reader, writer


def _options(max_tokens: int) -> dict[str, object]:
    # Special tokens shown: the text must tell all tokens, for comparing at ties.
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "skip_special_tokens": False}


def _require_equal(texts: list[tuple[Expected, str]], model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    odd = {(expected, text) for expected, text in texts if text != expected.text}
    for expected, text in odd:
        outputs = (tokenizer.encode(each).tolist() for each in (text, expected.text))
        assert not differ_beyond_ties(model_dir, expected.prompt, *outputs), (expected, text)
    assert len(odd) <= 3, f"{len(odd)} kinds of answers part at a tie"


def _require_quick_health(run: Callable[[int], HealthTimes], num_tries: int) -> None:
    """Call run(seed) until /health was quick all the time; a busy machine may spoil one run, not all."""
    reports = []
    for seed in range(1, num_tries + 1):
        times = run(seed)
        reports.append(str(times))
        if times.worst_s < HEALTH_LIMIT_S:
            return
    raise AssertionError("/health was slow each time:\n" + "\n".join(reports))
