"""Outputs of gpt-oss: messages in channels, for reasoning, calls and answers, set off by special tokens."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from forkpoint.server.parsers.cursor import Cursor, Reading, Sink
from forkpoint.server.parsers.json_text import read_value
from forkpoint.server.parsers.pieces import PieceWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
FUNCTIONS = "functions."
RECIPIENT = "to="
ANALYSIS_OPENING = f"{CHANNEL}analysis{MESSAGE}"
FINAL_OPENING = f"{CHANNEL}final{MESSAGE}"
NEXT_MESSAGE = f"{END}{START}assistant"

_ENDS_OF_HEADER = (MESSAGE, START, END, CALL, RETURN)
# The parts of a header; models write the recipient before or after the channel.
_HEADER_PARTS = re.compile(
    r"<\|start\|>\s*[\w.]*|<\|channel\|>\s*(?P<channel>\w*)|to=(?P<recipient>[^\s<]*)|<\|constrain\|>\s*\w*"
)


@dataclass(frozen=True, slots=True)
class HarmonyScope:
    """How an output is told. known_names: functions that may be called without `functions.` before the name.

    marked_names: those that may be called with it; None: any. tells_reasoning: False: it is content.
    """

    known_names: Container[str]
    marked_names: Container[str] | None
    tells_reasoning: bool = True


def read_harmony(cursor: Cursor, pieces: PieceWriter, scope: HarmonyScope) -> Reading[None]:
    """An output that goes on after `<|start|>assistant`, or after more of a header.

    A message to a function is a call, whatever its channel. Else `analysis` is reasoning and every other
    channel is content, as what comes without a header is: what a model wrote is never lost.
    Source: OpenAI's description of the format; where models leave it, the tests of its library.
    """
    content = _Joined(pieces.content)
    reasoning = _Joined(pieces.reasoning) if scope.tells_reasoning else content
    marker: str | None = ""
    while marker is not None:
        header = yield from _read_header(cursor, marker)
        marker = header.end
        if (name := _called_name(header.recipient, scope)) is not None:
            if marker == MESSAGE or header.body:
                pieces.begin_call(name)
                arguments = _Arguments(pieces)
                arguments.push(header.body)
                marker = yield from _read_body(cursor, marker, arguments.push)
                arguments.finish()
            continue
        is_reasoning = header.channel == "analysis"
        told = reasoning if is_reasoning else content
        told.begin_message()
        told.push(header.body)
        pieces.is_reasoning = is_reasoning and scope.tells_reasoning
        marker = yield from _read_body(cursor, marker, told.push)
        pieces.is_reasoning = False


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands before a message. end: the marker that ended it; None: the output ended.

    body: what was read of the message already, where no <|message|> sets it off.
    """

    channel: str = ""
    recipient: str = ""
    body: str = ""
    end: str | None = MESSAGE

    @classmethod
    def of(cls, text: str, end: str | None) -> _Header:
        """text: all of it, without the marker at its end."""
        channel = recipient = ""
        body_start = 0
        for part in _HEADER_PARTS.finditer(text):
            channel = channel or part["channel"] or ""
            recipient = recipient or part["recipient"] or ""
            body_start = part.end()
        if end == MESSAGE:
            return cls(channel, recipient)
        body = text[body_start:].lstrip()
        if recipient:
            body = body[body.index("{") :] if "{" in body else ""
        elif end is None and RECIPIENT.startswith(body):  # cut off
            body = ""
        return cls(channel, recipient, body, end)


def _read_header(cursor: Cursor, before: str) -> Reading[_Header]:
    """before: the marker that was read last; empty at the beginning of the output."""
    parts = [before]
    if before not in (START, CHANNEL):
        cursor.record()
        yield from cursor.skip_space()
        opening = ""
        for literal in (*MARKERS, RECIPIENT):
            if (yield from cursor.take_literal(literal)):
                opening = literal
                break
        is_over = (yield from cursor.peek()) == ""
        text = cursor.recorded()
        if opening in (MESSAGE, END, CALL, RETURN):
            return _Header(end=opening)
        if not opening and before and is_over:
            return _Header()
        if not opening:
            return _Header(body=text)
        parts = [text]
    end = yield from cursor.find(_ENDS_OF_HEADER, parts.append)
    text = "".join(parts)
    if end != MESSAGE and text.lstrip().startswith(RECIPIENT) and not any(m in text for m in MARKERS):
        return _Header(body=text, end=end)  # words that happen to begin so
    return _Header.of(text, end)


def _read_body(cursor: Cursor, marker: str | None, sink: Sink) -> Reading[str | None]:
    """Read up to the marker that ends the message, and give it. marker: the one that ended the header."""
    while marker in (MESSAGE, CONSTRAIN):
        marker = yield from cursor.find(MARKERS, sink)
    return marker


def _called_name(recipient: str, scope: HarmonyScope) -> str | None:
    if recipient in scope.known_names:
        return recipient
    name = recipient.removeprefix(FUNCTIONS)
    if not name or name == recipient:
        return None
    return name if scope.marked_names is None or name in scope.marked_names else None


class _Joined:
    """Gives the texts of several messages to one sink, with a line break between them. Mutable."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._has_text = False
        self._needs_break = False

    def begin_message(self) -> None:
        self._needs_break = self._has_text

    def push(self, text: str) -> None:
        if text:
            self._sink("\n" + text if self._needs_break else text)
            self._has_text, self._needs_break = True, False


class _Arguments:
    """Gives the body of a call on as it comes, with common faults of its JSON put right. Mutable."""

    def __init__(self, pieces: PieceWriter) -> None:
        self._cursor = Cursor()
        self._reading = _read_arguments(self._cursor, pieces.arguments)

    def push(self, text: str) -> None:
        self._cursor.push(text)
        next(self._reading, None)

    def finish(self) -> None:
        self._cursor.end()
        next(self._reading, None)


def _read_arguments(cursor: Cursor, sink: Sink) -> Reading[None]:
    """What follows a whole object is dropped. What is no object is given on as it is."""
    yield from cursor.skip_space()
    char = yield from cursor.peek()
    if not char:
        sink("{}")
        return
    is_whole = char == "{" and (yield from read_value(cursor, sink))
    while True:
        text = cursor.take_available()
        if text and not is_whole:
            sink(text)
        if cursor.has_ended:
            return
        yield
