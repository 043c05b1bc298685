"""Calls in plain text: a JSON object or list, alone or in a fenced block; for Gemma 3 Python's calls too.

This is what models write whose template knows no tools, so nothing but the name of a function that the
request gave tells a call from other text.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from forkpoint.server.parsers.call_objects import read_call_objects
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.literals import LiteralReader
from forkpoint.server.parsers.pieces import PieceWriter

FENCE = "```"
_FENCE_LABEL = re.compile(r"[A-Za-z_]+")
_JSON_LABELS = ("json", "tool_call", "tool_calls", "tool_code")
_PYTHON_LABELS = ("tool_code", "python")
_IDENTIFIER = re.compile(r"[\w.]+")
# Runs in which nothing opens or closes.
_PLAIN = re.compile(r"[^()\[\]{}'\"\\]+")


def read_json_calls(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str], *, reads_python: bool = False
) -> Reading[None]:
    """Calls at the beginning of the output, and in blocks of ```json or ```tool_call anywhere.

    reads_python: `[f(a=1), g(b="x")]` too, in ```tool_code or at the beginning. Source: the examples of
    Google's page on function calling with Gemma 3.
    """
    cursor.record()
    yield from cursor.skip_space()
    yield from _read_body(cursor, pieces, known_names, reads_python)
    while (marker := (yield from cursor.find((FENCE,), pieces.content))) is not None:
        cursor.record(marker)
        label = yield from cursor.take_whole_run(_FENCE_LABEL)
        yield from cursor.skip_space()
        is_python = reads_python and label in _PYTHON_LABELS
        if label not in _JSON_LABELS and not is_python:
            pieces.content(cursor.recorded())
        elif (yield from _read_body(cursor, pieces, known_names, is_python)):
            yield from cursor.skip_space()
            yield from cursor.take_literal(FENCE, or_its_beginning=True)


def _read_body(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str], reads_python: bool
) -> Reading[bool]:
    """Calls from here on, if there are any; else what was recorded is content, and the rest not read yet."""
    char = yield from cursor.peek()
    if char == "{" or (char == "[" and not reads_python):
        return (yield from read_call_objects(cursor, pieces, known_names))
    if not reads_python or not char:
        pieces.content(cursor.recorded())
        return False
    before = cursor.recorded()
    cursor.record()
    if char == "[":
        cursor.take_char()
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            cursor.record(before + cursor.recorded())
            are_calls = yield from read_call_objects(cursor, pieces, known_names)
            if are_calls:
                yield from cursor.take_literal("]")
            return are_calls
    return (yield from _read_python(cursor, pieces, known_names, before, cursor.recorded()))


def _read_python(
    cursor: Cursor, pieces: PieceWriter, known_names: Container[str], before: str, bracket: str
) -> Reading[bool]:
    """Calls in Python's form, in a list or one on each line. before, bracket: what was read already."""
    are_calls = False
    while True:
        cursor.record(bracket)
        name = yield from cursor.take_whole_run(_IDENTIFIER)
        if (name not in known_names and name != "print") or (yield from cursor.peek()) != "(":
            pieces.content(before + cursor.recorded())
            return are_calls
        yield from _skip_balanced(cursor, depth=1 if bracket else 0)
        code = cursor.recorded()
        calls = _python_calls(code)
        if not calls or any(name not in known_names for name, _ in calls):
            pieces.content(before + code)
            return are_calls
        for name, arguments in calls:
            pieces.call(name, arguments)
        are_calls = True
        if bracket:
            return True
        cursor.record()
        yield from cursor.skip_space()
        before = cursor.recorded()


def _skip_balanced(cursor: Cursor, depth: int) -> Reading[None]:
    """Read until every bracket is closed. depth: how many are open."""
    quote = ""
    while (char := (yield from cursor.peek())) != "":
        if cursor.take_run(_PLAIN):
            continue
        cursor.take_char()
        if char == "\\":
            if (yield from cursor.peek()):
                cursor.take_char()
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return


def _python_calls(code: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        return LiteralReader(code).python_calls()
    except ValueError:
        return []
