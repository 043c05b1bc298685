"""Whatever is asked and however the tokens arrive, a stream adds up to the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_engine import says
from support.http_server import World, events_of, serving
from support.text_doubles import EOS, SPECIAL

# Whole characters of one to four bytes, marks that combine, joiners, and bytes that belong to no character.
PIECES: list[str | bytes] = [
    "a", "b", "ab", " ", "\n", '"', "\\", "\x00", "é", "e\u0301", "漢", "字", "🦊",
    "👩\u200d👧", "\u200d", "\ufffd",
    b"\xff", b"\xe6\xbc", b"\xf0\x9f", b"\x80", b"\xc3",
]  # fmt: skip
STOPS = ["ab", "b", "é", "e\u0301b", "漢字", "🦊a", "aab", "\ufffd", "a b", "\n\n"]
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def reply_of(pieces: list[str | bytes]) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """The options that both APIs have."""
    body: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 40)),
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "stop": draw(st.lists(st.sampled_from(STOPS), max_size=3)),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([[], [SPECIAL], [ord("b")]])),
    }
    body["min_tokens"] = draw(st.integers(0, min(8, body["max_tokens"])))
    return body


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving() as world:
        yield world


run_often = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.lists(st.sampled_from(PIECES), max_size=16).map(reply_of)
endings = st.sampled_from([(EOS,), (SPECIAL, EOS), (), (SPECIAL,)])
steps = st.integers(1, 9)


@run_often
@given(texts, endings, steps, bodies(), st.none() | st.integers(0, 3), st.booleans())
def test_completion_stream_adds_up_to_the_answer(
    world: World,
    text: bytes,
    ending: tuple[int, ...],
    steps_per_turn: int,
    body: dict[str, Any],
    logprobs: int | None,
    echoes: bool,
) -> None:
    world.engine.reply = says(text, *ending)
    body = {**body, "prompt": "pé🦊", "echo": echoes, "logprobs": logprobs}
    world.engine.steps_per_turn = 1
    answer = world.complete(**body)
    world.engine.steps_per_turn = steps_per_turn
    events = _events(world, "/v1/completions", body)
    for whole in answer["choices"]:
        chunks = _chunks_of(events, whole["index"])
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert _ending(chunks) == _ending([whole])
        if logprobs is None:
            assert whole["logprobs"] is None and all(chunk["logprobs"] is None for chunk in chunks)
        else:
            told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
            for column in COLUMNS:
                assert [value for each in told for value in each[column]] == whole["logprobs"][column]
    assert events[-1]["usage"] == answer["usage"]


@run_often
@given(texts, endings, steps, bodies(), st.none() | st.integers(0, 3))
def test_chat_stream_adds_up_to_the_answer(
    world: World,
    text: bytes,
    ending: tuple[int, ...],
    steps_per_turn: int,
    body: dict[str, Any],
    top_logprobs: int | None,
) -> None:
    world.engine.reply = says(text, *ending)
    body = {**body, "messages": [{"role": "user", "content": "pé🦊"}]}
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
    world.engine.steps_per_turn = 1
    answer = world.chat(**body)
    world.engine.steps_per_turn = steps_per_turn
    events = _events(world, "/v1/chat/completions", body)
    for whole in answer["choices"]:
        first, *chunks = _chunks_of(events, whole["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
        assert _ending(chunks) == _ending([whole])
        told = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"] is not None]
        entries = [entry for content in told for entry in content]
        assert entries == (whole["logprobs"] or {"content": []})["content"]
    assert events[-1]["usage"] == answer["usage"]


def _events(world: World, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with world.http.stream("POST", path, json={**body, **options}) as response:
        return events_of(response)


def _chunks_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The choices of one index; none of them without news but the first of a chat."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    for chunk in chunks[1:-1]:
        assert chunk.get("text") or chunk.get("delta") or chunk["logprobs"] is not None, chunk
    return chunks


def _ending(chunks: list[dict[str, Any]]) -> tuple[Any, Any]:
    """How a choice ended; told once, by the last chunk."""
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])
    return chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]
