"""Streams: framing, order of chunks, usage, keep-alive, and equality with the whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx2
import pytest
from starlette.types import Message
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, World, events_of, raw_request, read_until, serving
from support.text_doubles import EOS, SPECIAL, ByteTokenizer

from forkpoint.configs.serving import ServerConfig
from forkpoint.server.app import create_app
from forkpoint.server.services import Timing


def test_official_client_streams_a_chat() -> None:
    with serving(FakeEngine(reply=says("Hello!", EOS))) as world:
        stream = world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_headers_keep_proxies_from_buffering() -> None:
    with serving() as world, _stream(world, max_tokens=1) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        events = events_of(response)
    assert all("usage" not in event for event in events)


def test_usage_comes_alone_last_and_sums_all_choices() -> None:
    options = {"include_usage": True}
    with (
        serving(FakeEngine(cached_tokens=3)) as world,
        _stream(world, n=3, max_tokens=4, stream_options=options) as response,
    ):
        events = events_of(response)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in chunks)


def test_continuous_usage_is_cumulative_and_ends_at_the_total() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving() as world, _stream(world, n=2, max_tokens=5, stream_options=options) as response:
        counts = [event["usage"]["completion_tokens"] for event in events_of(response)]
    assert counts == sorted(counts)
    assert counts[-1] == 10


def test_every_choice_has_one_role_one_finish_and_its_own_text() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 4, "max_tokens": 6, "stream": True}
    with serving() as world, world.http.stream("POST", "/v1/chat/completions", json=body) as response:
        choices = [event["choices"][0] for event in events_of(response)]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert all(choice["delta"]["content"] for choice in own[1:-1])
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "length"
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)


def test_text_completion_stream_has_no_role_chunk() -> None:
    with serving() as world, _stream(world, max_tokens=3) as response:
        events = events_of(response)
    assert [event["choices"][0]["text"] for event in events] == ["h", "e", "l", ""]
    assert {event["object"] for event in events} == {"text_completion"}


@pytest.mark.parametrize(
    "text",
    ["plain text", "an émigré, 🦊🦊 and 漢字", "<<<stop>> almost", "x<stop>hidden", "ends <sto"],
)
def test_stream_gives_the_text_of_the_whole_answer(text: str) -> None:
    with serving(FakeEngine(reply=says(text, SPECIAL, EOS))) as world:
        whole = world.complete(max_tokens=60, stop=["<stop>"])["choices"][0]
        assert whole["text"] == text.partition("<stop>")[0]
        for world.engine.steps_per_turn in (1, 3, 64):
            with _stream(world, max_tokens=60, stop=["<stop>"]) as response:
                choices = [event["choices"][0] for event in events_of(response)]
            assert "".join(choice["text"] for choice in choices) == whole["text"]
            assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
            assert choices[-1]["stop_reason"] == whole["stop_reason"]
            assert all(choice["text"] for choice in choices[:-1])


def test_no_beginning_of_a_stop_is_ever_sent() -> None:
    with (
        serving(FakeEngine(reply=says("abSTOP"))) as world,
        _stream(world, stop="STOP", max_tokens=20) as response,
    ):
        texts = [event["choices"][0]["text"] for event in events_of(response)]
    assert texts == ["a", "b", ""]


def test_text_arrives_while_the_sequence_still_runs() -> None:
    with (
        serving(FakeEngine(is_held=True)) as world,
        raw_request(world.url, "/v1/completions", {"prompt": "hey", "stream": True}) as connection,
    ):
        world.engine.until(lambda: world.engine.submits)
        world.engine.step()
        assert read_until(connection, b'"text":"h"').startswith(b"HTTP/1.1 200")
        world.engine.step()
        read_until(connection, b'"text":"e"')
        assert world.engine.num_running == 1


def test_status_is_not_sent_before_the_engine_took_the_request_up() -> None:
    with (
        serving(FakeEngine(is_held=True)) as world,
        raw_request(world.url, "/v1/completions", {"prompt": "hey", "stream": True}) as connection,
    ):
        world.engine.until(lambda: world.engine.submits)
        world.engine.die()
        assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 503")


def test_silent_stream_is_kept_alive_by_comments_before_and_after_its_start() -> None:
    with (
        serving(FakeEngine(is_held=True), timing=Timing(keep_alive_s=0.02)) as world,
        raw_request(world.url, "/v1/completions", {"prompt": "hey", "stream": True}) as connection,
    ):
        world.engine.until(lambda: world.engine.submits)
        assert b"data:" not in read_until(connection, b": keep-alive\n\n")
        world.engine.step()
        read_until(connection, b'"text":"h"')
        read_until(connection, b": keep-alive\n\n")
        world.engine.release()
        read_until(connection, b"data: [DONE]\n\n")


def test_slow_reader_gets_merged_tokens_and_the_engine_never_waits() -> None:
    frames = asyncio.run(_read_slowly(num_tokens=1000))
    events = [event for frame in frames for event in frame.split(b"\n\n") if event.startswith(b"data: {")]
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events]
    assert "".join(texts) == "x" * 1000
    assert len(texts) <= 4  # the first, at most two while the socket was full, the finish


async def _read_slowly(num_tokens: int) -> list[bytes]:
    """Stream into a socket that is full after the first frame until the engine has done everything."""
    engine = FakeEngine(reply=says("x" * num_tokens), is_held=True)
    app = create_app(ServerConfig(served_model_names=(MODEL,)), engine, ByteTokenizer(), None)
    body = json.dumps({"prompt": "p", "stream": True, "max_tokens": num_tokens}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    is_full, has_room = asyncio.Event(), asyncio.Event()
    frames: list[bytes] = []

    async def receive() -> Message:
        return requests.pop() if requests else await asyncio.Future()

    async def send(message: Message) -> None:
        frames.append(message.get("body", b""))
        if message["type"] == "http.response.body":
            is_full.set()
            await has_room.wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 2),
        "root_path": "",
    }  # fmt: skip
    request = asyncio.create_task(app(scope, receive, send))
    while not engine.submits:
        await asyncio.sleep(0)
    engine.step_here(1)
    await is_full.wait()
    for _ in range(num_tokens):
        engine.step_here(1)
        await asyncio.sleep(0)
    has_room.set()
    await request
    return frames


def _stream(world: World, **body: object) -> contextlib.AbstractContextManager[httpx2.Response]:
    return world.http.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True, **body})
