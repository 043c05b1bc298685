"""Runs the reading of one format as a MessageParser."""

from __future__ import annotations

from collections.abc import Callable

from forkpoint.server.message_pieces import ContentPiece, MessageParser, MessagePiece
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.pieces import PieceWriter

# Reads one whole output: a generator of its own for each.
ReadOutput = Callable[[Cursor, PieceWriter], Reading[None]]


class TextMachine:
    """Mutable; a MessageParser."""

    def __init__(self, read: ReadOutput, *, max_calls: int | None = None) -> None:
        self._cursor = Cursor()
        self._pieces = PieceWriter(max_calls)
        self._reading = read(self._cursor, self._pieces)

    @property
    def is_reasoning(self) -> bool:
        return self._pieces.is_reasoning

    def push(self, text: str) -> list[MessagePiece]:
        self._cursor.push(text)
        next(self._reading, None)
        return self._pieces.take()

    def finish(self) -> list[MessagePiece]:
        self._cursor.end()
        next(self._reading, None)
        self._pieces.finish()
        return self._pieces.take()


class PlainText:
    """A MessageParser to which all text is content."""

    is_reasoning = False

    def push(self, text: str) -> list[MessagePiece]:
        return [ContentPiece(text)] if text else []

    def finish(self) -> list[MessagePiece]:
        return []


class CallsAlone:
    """A MessageParser of an output that a grammar binds to calls: what else it reads is a call cut short."""

    def __init__(self, parser: MessageParser) -> None:
        """`parser` is owned from now on."""
        self._parser = parser

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    def push(self, text: str) -> list[MessagePiece]:
        return _without_content(self._parser.push(text))

    def finish(self) -> list[MessagePiece]:
        return _without_content(self._parser.finish())


def _without_content(pieces: list[MessagePiece]) -> list[MessagePiece]:
    return [piece for piece in pieces if not isinstance(piece, ContentPiece)]
