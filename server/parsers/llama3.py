"""Calls as Llama 3.1 to 3.3 write them: {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>."""

from __future__ import annotations

from collections.abc import Container

from forkpoint.server.parsers.call_objects import read_call_objects
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.pieces import PieceWriter

PYTHON_TAG = "<|python_tag|>"


def read_llama3(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str], marked_names: Container[str] | None
) -> Reading[None]:
    """Without the tag a call is one at the beginning of the output only; several are separated by `;`.

    Source: Meta's prompt format pages for Llama 3.1 and 3.2.
    """
    cursor.record()
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        yield from read_call_objects(cursor, pieces, known_names)
    else:
        pieces.content(cursor.recorded())
    while (marker := (yield from cursor.find((PYTHON_TAG,), pieces.content))) is not None:
        cursor.record(marker)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) in ("{", "["):
            yield from read_call_objects(cursor, pieces, marked_names)
        else:
            pieces.content(cursor.recorded())
