"""`forkpoint bench` against servers over real sockets: ours, and ones that lack what others have."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_server import MODEL, serving

from forkpoint.server.cli import run

Body = dict[str, Any]


def bench(url: str, *flags: str, tmp_path: Path) -> tuple[int, Body]:
    """Exit status and the JSON of a small run."""
    file = tmp_path / "bench.json"
    small = ("--system-tokens", "40", "--question-tokens", "16", "--output-tokens", "4", "--num-prompts", "6")
    status = run(["bench", "--base-url", url, *small, "--json", str(file), *flags])
    return status, json.loads(file.read_bytes()) if file.exists() else {}


# ---- our own


@pytest.mark.parametrize(
    "load", [("--concurrency", "2"), ("--request-rate", "inf"), ("--request-rate", "200")]
)
@pytest.mark.parametrize("workload", ["shared-prefix", "random", "chat"])
def test_each_workload_and_load_against_our_server(
    workload: str, load: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(cached_tokens=3)
    with serving(engine) as world:
        status, result = bench(
            world.url, "--workload", workload, *load, "--turns", "3", "--num-prefixes", "2",
            "--warmup-requests", "1", tmp_path=tmp_path,
        )  # fmt: skip
    assert status == 0
    turns = 3 if workload == "chat" else 1
    assert (result["completed"], result["failed"]) == (6 * turns, 0)
    assert len(result["requests"]) == 7 * turns, "the warm-up is listed"
    assert sum(each["is_warmup"] for each in result["requests"]) == turns
    assert result["total_output_tokens"] == 6 * turns * 4, "answers are as long as asked for"
    assert result["cached_tokens"] == 6 * turns * 3
    assert result["model"] == MODEL and result["notes"] == []
    for request in result["requests"]:
        assert request["ttft_s"] > 0 and len(request["itls_s"]) == request["output_tokens"] - 1
        if workload != "chat":
            assert request["prompt_tokens"] == (56 if workload == "shared-prefix" else 16)
    for name in ("ttft", "tpot", "itl", "e2el"):
        parts = [result[f"{part}_{name}_ms"] for part in ("mean", "median", "p90", "p99", "std")]
        assert all(part is not None and part >= 0 for part in parts)
    told = capsys.readouterr().out
    assert "time to first token" in told and "token hit rate" in told


def test_a_chat_holds_the_answers_and_system_prompts_are_shared(tmp_path: Path) -> None:
    with serving(FakeEngine()) as world:
        bench(world.url, "--workload", "chat", "--turns", "2", "--num-prefixes", "1", tmp_path=tmp_path)
        assert world.template is not None
        calls = [messages for messages, _ in world.template.calls if messages[0]["role"] == "system"]
    systems = {messages[0]["content"] for messages in calls}
    assert len(systems) == 1
    roles = {tuple(message["role"] for message in messages) for messages in calls}
    assert ("system", "user", "assistant", "user") in roles


def test_a_model_without_a_template_gets_its_chats_as_text_and_that_is_said(tmp_path: Path) -> None:
    with serving(FakeEngine(), has_template=False) as world:
        status, result = bench(world.url, "--workload", "chat", tmp_path=tmp_path)
    assert status == 0
    assert any("no chat template" in note for note in result["notes"])


def test_flush_cache_empties_it_first(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine) as world:
        assert bench(world.url, "--flush-cache", tmp_path=tmp_path)[0] == 0
    assert engine.num_flushes == 1


def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine()) as world:
        small = (
            "--system-tokens",
            "0",
            "--question-tokens",
            "8",
            "--output-tokens",
            "2",
            "--num-prompts",
            "2",
        )
        assert run(["bench", "--base-url", world.url, *small, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["completed"] == 2
    assert "time to first token" in output.err


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    with serving(FakeEngine()) as world:
        assert bench(world.url, "--plot", str(tmp_path / "bench.png"), tmp_path=tmp_path)[0] == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_key_is_sent_and_never_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine(), api_keys=("s3cret",)) as world:
        assert bench(world.url, tmp_path=tmp_path) == (1, {})
        assert "wants a key" in capsys.readouterr().err
        assert bench(world.url, "--api-key", "s3cret", tmp_path=tmp_path)[0] == 0
    assert "s3cret" not in (tmp_path / "bench.json").read_text()


# ---- others


@dataclass
class Stranger:
    """A server that somebody else wrote. answer: what a POST gets. bodies: what was asked. Mutable."""

    answer: Callable[[str, Body], tuple[int, bytes]]
    bodies: list[tuple[str, Body]] = field(default_factory=list)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                length = int(
                    next(line for line in head.lower().split(b"\r\n") if b"length" in line).split(b":")[1]
                )
                content = await reader.readexactly(length)
                if method == "GET":
                    status, body = 200, b'{"data": [{"id": "theirs"}]}'
                else:
                    self.bodies.append((path, json.loads(content)))
                    status, body = self.answer(path, json.loads(content))
                header = f"HTTP/1.1 {status} So\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                writer.write(header + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@contextmanager
def stranger(answer: Callable[[str, Body], tuple[int, bytes]]) -> Iterator[tuple[str, Stranger]]:
    server = Stranger(answer)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_port() -> asyncio.Server:
        return await asyncio.start_server(server.serve_connection, "127.0.0.1", 0)

    listening = asyncio.run_coroutine_threadsafe(open_port(), loop).result(10)

    async def close_all() -> None:
        listening.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", server
    finally:
        asyncio.run_coroutine_threadsafe(close_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def events(*contents: object) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in contents) + b"data: [DONE]\n\n"
    )


def two_chunks(usage: Body | None) -> bytes:
    chunks: list[object] = [
        {"choices": [{"text": "a b"}]},
        {"choices": [{"text": " c", "finish_reason": "length"}]},
    ]
    return events(*chunks, *([] if usage is None else [{"choices": [], "usage": usage}]))


def usage_of(body: Body) -> Body:
    return {"prompt_tokens": len(str(body["prompt"]).split()) + 1, "completion_tokens": 4}


def test_without_tokenize_lengths_come_from_usage_and_are_said_to_be_about_right(tmp_path: Path) -> None:
    def answer(path: str, body: Body) -> tuple[int, bytes]:
        return (404, b"{}") if path == "/tokenize" else (200, two_chunks(usage_of(body)))

    with stranger(answer) as (url, _):
        status, result = bench(url, tmp_path=tmp_path)
    assert status == 0 and result["model"] == "theirs"
    assert any("about right" in note for note in result["notes"])
    assert all(abs(each["prompt_tokens"] - 56) <= 3 for each in result["requests"])
    assert result["cached_tokens"] is None and result["token_hit_rate"] is None
    assert result["total_output_tokens"] == 24, "counted by usage, not by chunks"
    assert all(len(each["itls_s"]) == 2 for each in result["requests"]), "the second chunk held half of four"


def test_llama_cpp_counts_in_its_own_form(tmp_path: Path) -> None:
    def answer(path: str, body: Body) -> tuple[int, bytes]:
        if path == "/tokenize":
            words = str(body.get("content", "")).split()
            return 200, json.dumps({"tokens": [0] * (len(words) + bool(body.get("add_special")))}).encode()
        return 200, two_chunks(usage_of(body))

    with stranger(answer) as (url, _):
        _, result = bench(url, tmp_path=tmp_path)
    assert {each["prompt_tokens"] for each in result["requests"]} == {56}


def test_a_server_that_refuses_ignore_eos_is_asked_without_it(tmp_path: Path) -> None:
    def answer(path: str, body: Body) -> tuple[int, bytes]:
        if "ignore_eos" in body:
            return 400, b'{"error": {"message": "unknown field ignore_eos"}}'
        return (404, b"{}") if path == "/tokenize" else (200, two_chunks(usage_of(body)))

    with stranger(answer) as (url, _):
        status, result = bench(url, tmp_path=tmp_path)
    assert status == 0
    assert any("ignore_eos" in note for note in result["notes"])


def test_neither_tokenize_nor_usage_is_an_error_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str, body: Body) -> tuple[int, bytes]:
        return (404, b"{}") if path == "/tokenize" else (200, two_chunks(None))

    with stranger(answer) as (url, _):
        assert bench(url, tmp_path=tmp_path)[0] == 1
    assert "--tokenizer" in capsys.readouterr().err


def test_failures_are_counted_told_and_in_no_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = iter(range(10_000))

    def answer(path: str, body: Body) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 404, b"{}"
        number = next(count) - 3  # after the probes
        if number in (1, 2):
            return 500, b'{"error": {"message": "out of pages"}}'
        if number == 4:
            return 200, events({"choices": [{"text": "a"}]}, {"error": {"message": "the engine died"}})
        return 200, two_chunks(usage_of(body))

    with stranger(answer) as (url, _):
        status, result = bench(url, "--concurrency", "1", tmp_path=tmp_path)
    assert status == 0 and (result["completed"], result["failed"]) == (3, 3)
    assert result["errors"][0] == {"message": "status 500: out of pages", "count": 2}
    assert "failed 2 times: status 500: out of pages" in capsys.readouterr().out
    assert sum(each["error"] is not None for each in result["requests"]) == 3


def test_status_1_if_nothing_could_be_measured(tmp_path: Path) -> None:
    count = iter(range(10_000))

    def answer(path: str, body: Body) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 404, b"{}"
        return (200, two_chunks(usage_of(body))) if next(count) < 3 else (503, b"no")

    with stranger(answer) as (url, _):
        status, result = bench(url, tmp_path=tmp_path)
    assert (status, result["completed"], result["failed"]) == (1, 0, 6)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "other"), "does not serve 'other'"),
        (("--turns", "0"), "--turns is 0"),
        (("--request-rate", "0"), "--request-rate is 0"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--burstiness", "-1"), "--burstiness is -1"),
        (("--timeout-s", "0"), "--timeout-s is 0"),
        (("--prompt-format", "ids"), "--prompt-format ids needs --tokenizer"),
        (("--tokenizer", "/nowhere"), "no tokenizer.json"),
        (("--plot", "/nowhere/at/all.png"), "there is no such folder"),
        (("--workload", "zipf"), "zipf"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEngine()) as world:
        assert bench(world.url, *flags, tmp_path=tmp_path) == (2, {})
    error = capsys.readouterr().err
    assert complaint in error and "Traceback" not in error


def test_nobody_at_the_address_is_one_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("http://127.0.0.1:9", tmp_path=tmp_path) == (1, {})
    error = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in error and "--base-url" in error
