"""What `forkpoint bench` reads out of a stream, at any cut: tokens, times, usage, faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.server.bench.record import Answer
from forkpoint.server.bench.stream import AnswerStream


def frame(content: object) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, **more}]}


def delta(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
WHOLE = (text("a"), text("b"), text("c", finish_reason="length"), USAGE, b"[DONE]")


def read(*frames: object) -> Answer:
    """Frame i arrives at second i + 1."""
    stream = AnswerStream()
    for index, content in enumerate(frames):
        stream.feed(frame(content), index + 1.0)
    return stream.answer()


def test_a_whole_answer() -> None:
    answer = read(*WHOLE)
    assert answer.error is None
    assert (answer.text, answer.finish_reason) == ("abc", "length")
    assert (answer.ttft_s, answer.last_s) == (1.0, 3.0)
    assert answer.itls_s == (1.0, 1.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 3)
    assert answer.is_counted


@given(st.integers(1, 40))
def test_cuts_do_not_matter(size: int) -> None:
    content = b": keep-alive\n\n" + b"".join(map(frame, WHOLE))
    stream = AnswerStream()
    for start in range(0, len(content), size):
        stream.feed(content[start : start + size], 1.0)
    answer = stream.answer()
    assert (answer.text, answer.output_tokens, answer.error) == ("abc", 3, None)


def test_the_role_alone_is_no_token_and_thoughts_are() -> None:
    answer = read(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="yes"), b"[DONE]"
    )
    assert answer.ttft_s == 2.0
    assert answer.text == "yes"
    assert (answer.output_tokens, answer.is_counted) == (2, False)
    assert answer.prompt_tokens is None and answer.cached_tokens is None


def test_a_server_that_counts_in_each_chunk_is_believed() -> None:
    chunks = [
        text("a") | {"usage": {"completion_tokens": 1}},
        text("bcd") | {"usage": {"completion_tokens": 4}},
    ]
    answer = read(*chunks, b"[DONE]")
    assert answer.itls_s == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert answer.output_tokens == 4


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ((text("a"), {"error": {"message": "the engine died"}}), "the engine died"),
        ((text("a"),), "ended in the middle"),
        ((b"[DONE]",), "empty"),
        ((b"{oops",), "no JSON"),
    ],
)
def test_what_is_no_whole_answer_has_failed(frames: tuple[object, ...], complaint: str) -> None:
    error = read(*frames).error
    assert error is not None and complaint in error


@pytest.mark.parametrize("odd", [b"null", b"[]", b"3", {"choices": None}, {"choices": [7]}, {"usage": 5}])
def test_odd_events_are_passed_over(odd: object) -> None:
    assert read(odd, *WHOLE).error is None
