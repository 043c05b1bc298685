"""Reads JSON values as they come and passes their text on, with common faults in strings put right."""

from __future__ import annotations

import json
import re

from forkpoint.server.parsers.cursor import Cursor, Reading, Sink

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL_RUN = re.compile(r"[\x00-\x1f]+")
_WORD_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SPACE_RUN = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_HEX_RUN = re.compile(r"[0-9A-Fa-f]{1,4}")
_CLOSING = {"{": "}", "[": "]"}


def read_value(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """Read one value. True: it was complete and valid; False: the text ended or went on otherwise.

    Its text goes to `sink` as it comes. Line breaks inside strings become escapes, and backslashes that
    escape nothing become characters: models write both, and no reader would take them.
    """
    open_brackets: list[str] = []
    expects = "value"
    while True:
        char = yield from cursor.peek()
        if char == "":
            return False
        if char in " \t\r\n":
            sink(cursor.take_run(_SPACE_RUN))
            continue
        is_over = False  # a value ends here
        if expects in ("comma", "key or end", "value or end") and char == _CLOSING[open_brackets[-1]]:
            sink(cursor.take_char())
            open_brackets.pop()
            is_over = True
        elif expects == "comma" and char == ",":
            sink(cursor.take_char())
            expects = "key" if open_brackets[-1] == "{" else "value"
        elif expects == "colon" and char == ":":
            sink(cursor.take_char())
            expects = "value"
        elif expects in ("key", "key or end") and char == '"':
            if not (yield from read_string(cursor, sink)):
                return False
            expects = "colon"
        elif expects not in ("value", "value or end"):
            return False
        elif char in "{[":
            sink(cursor.take_char())
            open_brackets.append(char)
            expects = "key or end" if char == "{" else "value or end"
        elif char == '"':
            if not (yield from read_string(cursor, sink)):
                return False
            is_over = True
        else:
            word = yield from cursor.take_whole_run(_WORD_RUN)
            if word:
                sink(word)
            if not _WORD.fullmatch(word):
                return False
            is_over = True
        if is_over:
            if not open_brackets:
                return True
            expects = "comma"


def read_string(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """Read a string from its first quotation mark on; as read_value()."""
    sink(cursor.take_char())
    while True:
        char = yield from cursor.peek()
        if char == "":
            return False
        if char == '"':
            sink(cursor.take_char())
            return True
        if char == "\\":
            cursor.take_char()
            if not (yield from _read_escape(cursor, sink)):
                return False
        elif run := cursor.take_run(_STRING_RUN):
            sink(run)
        else:
            sink(json.dumps(cursor.take_run(_CONTROL_RUN))[1:-1])


def _read_escape(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """What follows a backslash. False: the text ended."""
    char = yield from cursor.peek()
    if char == "":
        return False
    if char == "u":
        cursor.take_char()
        digits = ""
        while len(digits) < 4 and (yield from cursor.peek()) and (run := cursor.take_run(_HEX_RUN)):
            if len(digits) + len(run) > 4:  # the run was cut: only the first of it belong to the escape
                sink("\\u" + (digits + run)[:4] + (digits + run)[4:])
                return True
            digits += run
        sink("\\u" + digits if len(digits) == 4 else "\\\\u" + digits)
    elif char in '"\\/bfnrt':
        sink("\\" + cursor.take_char())
    elif char == "'":
        sink(cursor.take_char())
    else:
        sink("\\\\")  # the character itself is read as the next one of the string
    return True


def collected(cursor: Cursor) -> Reading[str | None]:
    """Read one value and give its text; None if it is not valid."""
    pieces: list[str] = []
    return "".join(pieces) if (yield from read_value(cursor, pieces.append)) else None
