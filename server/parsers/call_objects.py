"""Reads calls written as JSON objects: {"name": ..., "arguments": {...}}, alone or in lists."""

from __future__ import annotations

import json
from collections.abc import Container

from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.json_text import collected, read_value
from forkpoint.server.parsers.pieces import PieceWriter

_ARGUMENTS = ("arguments", "parameters")
# Others than these make it an object of another kind, which must not be held back until its end.
_KEYS = ("name", "type", "id", *_ARGUMENTS)


def read_call_object(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str] | None
) -> Reading[bool]:
    """Read one call; the cursor stands at its brace and records. False: it was none, all is content now.

    known_names: the functions there are, where nothing but the name tells a call from other JSON; None: any.
    Arguments are passed on as they come where the name stands before them. A call that breaks off after that
    stays one.
    """
    cursor.take_char()
    name: str | None = None
    late_arguments: str | None = None  # came before the name, or as no object
    has_begun = False
    while True:
        key = yield from _read_key(cursor)
        if key is None or (key not in _KEYS and not has_begun):
            break
        if key in _ARGUMENTS and name is not None and not has_begun and (yield from cursor.peek()) == "{":
            has_begun = True
            cursor.recorded()
            pieces.begin_call(name)
            if not (yield from read_value(cursor, pieces.arguments)):
                return True
        else:
            value = yield from collected(cursor)
            if value is None:
                break
            if key == "name" and not has_begun:
                name = _name_of(value, known_names)
                if name is None:
                    break
            elif key in _ARGUMENTS:
                late_arguments = value
        yield from cursor.skip_space()
        char = yield from cursor.peek()
        if char == ",":
            cursor.take_char()
        elif char == "}":
            cursor.take_char()
            if has_begun:
                return True
            if name is None:
                break
            cursor.recorded()
            pieces.begin_call(name)
            pieces.arguments(_unwrapped(late_arguments))
            return True
        else:
            break
    if not has_begun:
        pieces.content(cursor.recorded())
    return has_begun


def read_call_objects(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str] | None
) -> Reading[bool]:
    """Read a list of calls, or several one after the other with `;`, `,` or space between them.

    The cursor stands at a bracket or brace and records. False: not even the first was one, all of what was
    read is content now.
    """
    is_list = (yield from cursor.take_literal("[")) is True
    num_calls = 0
    while True:
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != "{":
            pieces.content(cursor.recorded())
            return num_calls > 0
        if not (yield from read_call_object(cursor, pieces, known_names)):
            return num_calls > 0
        num_calls += 1
        cursor.record()
        yield from cursor.skip_space()
        char = yield from cursor.peek()
        if is_list and char in ("]", ""):
            cursor.take_char()
            cursor.recorded()
            return True
        if char and char in ",;":
            cursor.take_char()


def _read_key(cursor: Cursor) -> Reading[str | None]:
    """The next key of an object, with its colon; None if there is none."""
    yield from cursor.skip_space()
    if (yield from cursor.peek()) != '"':
        return None
    text = yield from collected(cursor)
    yield from cursor.skip_space()
    if text is None or not (yield from cursor.take_literal(":")):
        return None
    yield from cursor.skip_space()
    return str(json.loads(text))


def _name_of(text: str, known_names: Container[str] | None) -> str | None:
    name = json.loads(text) if text.startswith('"') else None
    if not isinstance(name, str) or not name:
        return None
    return name if known_names is None or name in known_names else None


def _unwrapped(arguments: str | None) -> str:
    """Arguments that some models put into a string once more, or leave out."""
    if arguments is None or arguments == "null":
        return "{}"
    if arguments.startswith('"'):
        inner = json.loads(arguments)
        try:
            if isinstance(json.loads(inner), dict):
                return str(inner)
        except (ValueError, RecursionError):
            pass
    return arguments
