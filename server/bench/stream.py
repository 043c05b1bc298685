"""Reads the event stream of one answer as it arrives: which tokens came when, the usage, the error.

Knows no sockets and no clock: bytes and times are handed in, so that each figure can be tested.
"""

from __future__ import annotations

from typing import Any

import orjson

from forkpoint.server.bench.record import Answer, Chunk, inter_token_latencies
from forkpoint.server.chat_client import message_of

_MAX_EVENT_BYTES = 1 << 24


class AnswerStream:
    """One answer on its way. Mutable: feed() it, then ask for the answer(). Times count from the sending."""

    def __init__(self) -> None:
        self._rest = b""
        self._texts: list[str] = []
        self._chunks: list[Chunk] = []
        self._usage: dict[str, Any] = {}
        self._last_s: float | None = None
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._has_ended = False

    @property
    def has_begun(self) -> bool:
        return bool(self._chunks)

    def feed(self, piece: bytes, now_s: float) -> None:
        """Read what came. Never raises: what is no event stream becomes the answer's error."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            self._fail("the server sent an event without end")
            self._rest = b""
        for line in lines:
            # Comments, event names and empty lines say nothing here; each of these servers sends an event's
            # JSON as one line.
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now_s)

    def answer(self, error: str | None = None) -> Answer:
        """What came. error: why nothing more will, if it is not the end of a whole answer."""
        failure = self._error or error
        if failure is None and not self._has_ended and self._finish_reason is None:
            failure = "the stream ended in the middle of the answer"
        told = _count(self._usage.get("completion_tokens"))
        num_tokens = len(self._chunks) if told is None else told
        if failure is None and num_tokens == 0:
            failure = "the answer is empty"
        details = self._usage.get("prompt_tokens_details")
        times_s = [chunk.at_s for chunk in self._chunks]
        return Answer(
            text="".join(self._texts),
            ttft_s=times_s[0] if times_s else self._last_s,
            last_s=self._last_s,
            itls_s=inter_token_latencies(self._chunks, num_tokens),
            gaps_s=tuple(after - before for before, after in zip(times_s, times_s[1:], strict=False)),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            output_tokens=num_tokens,
            is_counted=told is not None,
            finish_reason=self._finish_reason,
            error=failure,
        )

    def _read_event(self, content: bytes, now_s: float) -> None:
        if content == b"[DONE]":
            self._has_ended = True
            return
        try:
            event = orjson.loads(content)
        except orjson.JSONDecodeError:
            self._fail(f"the server sent an event that is no JSON: {content[:100]!r}")
            return
        if not isinstance(event, dict):  # llama.cpp begins with null
            return
        if event.get("error"):
            self._fail(f"the server broke off: {message_of(event)}")
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        self._read_choice(choices[0], _count(usage.get("completion_tokens")) if usage else None, now_s)

    def _read_choice(self, choice: dict[str, Any], num_tokens: int | None, now_s: float) -> None:
        self._last_s = now_s
        finish_reason = choice.get("finish_reason")
        self._finish_reason = self._finish_reason or (str(finish_reason) if finish_reason else None)
        delta = choice.get("delta")
        content, thought = (
            (delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning"))
            if isinstance(delta, dict)
            else (choice.get("text"), None)
        )
        if isinstance(content, str):
            self._texts.append(content)
        # A first event that only names the role is no token; one without text may bring some, which show
        # nothing (special tokens, half a character), and then the server counts them.
        is_new = num_tokens is not None and num_tokens > (
            (self._chunks[-1].num_tokens or 0) if self._chunks else 0
        )
        if content or thought or is_new:
            self._chunks.append(Chunk(now_s, num_tokens))

    def _fail(self, error: str) -> None:
        self._error = self._error or error


def _count(value: object) -> int | None:
    """A number of tokens, or None for anything else: what a server does not say is never 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
