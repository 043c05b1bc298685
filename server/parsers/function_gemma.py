"""Calls as FunctionGemma writes them: <start_function_call>call:f{a:<escape>x<escape>}<end_function_call>."""

from __future__ import annotations

import re
from collections.abc import Container

from forkpoint.server.parsers.call_objects import read_call_objects
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.literals import LiteralReader
from forkpoint.server.parsers.pieces import PieceWriter

OPENING, CLOSING, STRING_MARK = "<start_function_call>", "<end_function_call>", "<escape>"
_CALL = re.compile(r"call:([\w.-]+)\s*(\{.*\})", re.DOTALL)


def read_function_gemma(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str], marked_names: Container[str] | None
) -> Reading[None]:
    """A call is told when it is complete, since its arguments are no JSON until then.

    JSON objects at the beginning of the output are read too, since forced calls are written so.

    Source: Google's page on formatting and best practices for FunctionGemma.
    """
    cursor.record()
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        yield from read_call_objects(cursor, pieces, known_names)
    else:
        pieces.content(cursor.recorded())
    while (marker := (yield from cursor.find((OPENING,), pieces.content))) is not None:
        body: list[str] = []
        end = yield from cursor.find((CLOSING,), body.append)
        text = "".join(body)
        call = _call(text)
        if call is None or not (marked_names is None or call[0] in marked_names):
            pieces.content(marker + text + (end or ""))
        else:
            pieces.call(*call)


def _call(text: str) -> tuple[str, dict[str, object]] | None:
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return None
    try:
        return match.group(1), LiteralReader(match.group(2), string_mark=STRING_MARK).object()
    except ValueError:
        return None
