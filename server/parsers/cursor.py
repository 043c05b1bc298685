"""The text of one output as it comes: what a parser has not read yet, and readings that wait for more.

A parser is written as a generator that reads from front to back and yields wherever it needs more text, so
that how the text was cut makes no difference. What was read is dropped, unless it is being recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
# Yields where it needs more text; returns what it read.
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]+")


class Cursor:
    """Mutable: the text from the reading position on. The time it takes is linear in the text."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self.has_ended = True

    def record(self, read_before: str = "") -> None:
        """From now on keep what is read, in case that it is no call; read_before is the beginning of it."""
        self._record = [read_before]

    def recorded(self) -> str:
        """What was read since record(), which ends."""
        record, self._record = self._record or [], None
        return "".join(record)

    def take_available(self) -> str:
        """Read all that is there; perhaps nothing."""
        return self._advance(len(self._text) - self._at)

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what is there of a run that `pattern` matches from here; perhaps nothing."""
        match = pattern.match(self._text, self._at)
        return self._advance(match.end() - self._at) if match else ""

    def take_char(self) -> str:
        """Read the character that peek() just showed."""
        return self._advance(1)

    def peek(self) -> Reading[str]:
        """The next character, not read yet; empty at the end of the text."""
        while self._at == len(self._text):
            if self.has_ended:
                return ""
            yield
        return self._text[self._at]

    def take_whole_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read characters as long as `pattern`, which matches runs of single ones, matches."""
        pieces = []
        while (yield from self.peek()) and (piece := self.take_run(pattern)):
            pieces.append(piece)
        return "".join(pieces)

    def skip_space(self) -> Reading[str]:
        return (yield from self.take_whole_run(_SPACE))

    def take_literal(self, literal: str, *, or_its_beginning: bool = False) -> Reading[bool]:
        """Read `literal` if it comes next. or_its_beginning: read a part of it where the text is cut off."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self._advance(len(literal))
                return True
            if not literal.startswith(there):
                return False
            if self.has_ended:
                if or_its_beginning:
                    self._advance(len(there))
                return False
            yield

    def find(self, markers: tuple[str, ...], sink: Sink) -> Reading[str | None]:
        """Read up to and with the first marker, and give it; what comes before goes to `sink`.

        None: the text ended without one. What may be the beginning of a marker is held back.
        """
        pattern = _any_of(markers)
        while True:
            match = pattern.search(self._text, self._at)
            if match:
                _give(sink, self._advance(match.start() - self._at))
                return self._advance(match.end() - match.start())
            num_held = 0 if self.has_ended else self._num_held(markers)
            _give(sink, self._advance(len(self._text) - self._at - num_held))
            if self.has_ended:
                return None
            yield

    def _num_held(self, markers: tuple[str, ...]) -> int:
        longest = max(map(len, markers)) - 1
        for start in range(max(self._at, len(self._text) - longest), len(self._text)):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return len(self._text) - start
        return 0

    def _advance(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._record is not None and text:
            self._record.append(text)
        return text


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _give(sink: Sink, text: str) -> None:
    if text:
        sink(text)
