"""Calls as Mistral's models write them: [TOOL_CALLS][{...}], and from 2025 on [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
from collections.abc import Container

from forkpoint.server.parsers.call_objects import read_call_objects
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.json_text import read_value
from forkpoint.server.parsers.pieces import PieceWriter

OPENING, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")


def read_mistral(cursor: Cursor, pieces: PieceWriter, marked_names: Container[str] | None) -> Reading[None]:
    """Both forms. Source: mistral-common's tokenizers v3 and v11, and the models' chat templates."""
    while (marker := (yield from cursor.find((OPENING,), pieces.content))) is not None:
        cursor.record(marker)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) in ("{", "["):
            yield from read_call_objects(cursor, pieces, marked_names)
        else:
            yield from _read_named_call(cursor, pieces, marked_names)


def _read_named_call(
    cursor: Cursor, pieces: PieceWriter, marked_names: Container[str] | None
) -> Reading[None]:
    name = yield from cursor.take_whole_run(_NAME_RUN)
    yield from cursor.skip_space()
    if (yield from cursor.take_literal(CALL_ID)):
        yield from cursor.take_whole_run(_NAME_RUN)
    yield from cursor.take_literal(ARGUMENTS)
    yield from cursor.skip_space()
    is_known = marked_names is None or name in marked_names
    if not name or not is_known or (yield from cursor.peek()) != "{":
        pieces.content(cursor.recorded())
        return
    cursor.recorded()
    pieces.begin_call(name)
    yield from read_value(cursor, pieces.arguments)
