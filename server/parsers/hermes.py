"""Calls as Hermes and Qwen 2.5 / 3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from forkpoint.server.parsers.call_objects import read_call_object
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.pieces import PieceWriter

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def read_hermes(cursor: Cursor, pieces: PieceWriter) -> Reading[None]:
    """Source: the chat templates of NousResearch/Hermes-2-Pro and Qwen/Qwen2.5."""
    while (marker := (yield from cursor.find((OPENING,), pieces.content))) is not None:
        cursor.record(marker)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != "{":
            pieces.content(cursor.recorded())
        elif (yield from read_call_object(cursor, pieces, None)):
            yield from cursor.skip_space()
            yield from cursor.take_literal(CLOSING, or_its_beginning=True)
