"""Calls as Hermes and Qwen 2.5 / 3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Container

from forkpoint.server.parsers.call_objects import read_call_object
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.pieces import PieceWriter

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def read_hermes(cursor: Cursor, pieces: PieceWriter, marked_names: Container[str] | None) -> Reading[None]:
    """Source: the chat templates of NousResearch/Hermes-2-Pro and Qwen/Qwen2.5."""
    while (marker := (yield from cursor.find((OPENING,), pieces.content))) is not None:
        cursor.record(marker)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != "{":
            pieces.content(cursor.recorded())
        elif (yield from read_call_object(cursor, pieces, marked_names)):
            yield from cursor.skip_space()
            yield from cursor.take_literal(CLOSING, or_its_beginning=True)
