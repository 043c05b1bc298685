"""Calls as Qwen3-Coder writes them, in tags: <function=f><parameter=a>x</parameter></function>."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from forkpoint.server.parsers.call_objects import read_call_object
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.hermes import CLOSING, OPENING
from forkpoint.server.parsers.pieces import PieceWriter

_FUNCTION = re.compile(r"<function=([^>\s]+)>")
# A value ends where the next parameter or the function does, whether or not it was closed.
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL)

# Name of a function to its parameters' schemas by name.
ParameterSchemas = Mapping[str, Mapping[str, Any]]


def read_qwen3_coder(
    cursor: Cursor, pieces: PieceWriter, schemas: ParameterSchemas, marked_names: Container[str] | None
) -> Reading[None]:
    """A call is told when it is complete: only then are its arguments JSON. The JSON form is read too.

    schemas: tell which values are strings. Source: the chat template of Qwen/Qwen3-Coder.
    """
    while (marker := (yield from cursor.find((OPENING,), pieces.content))) is not None:
        cursor.record(marker)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            if (yield from read_call_object(cursor, pieces, marked_names)):
                yield from cursor.skip_space()
                yield from cursor.take_literal(CLOSING, or_its_beginning=True)
            continue
        before = cursor.recorded()
        body: list[str] = []
        end = yield from cursor.find((CLOSING,), body.append)
        text = "".join(body)
        call = _call(text, schemas)
        if call is None or not (marked_names is None or call[0] in marked_names):
            pieces.content(before + text + (end or ""))
        else:
            pieces.call(*call)


def _call(text: str, schemas: ParameterSchemas) -> tuple[str, dict[str, Any]] | None:
    text = text.strip()
    match = _FUNCTION.match(text)
    if match is None:
        return None
    name = match.group(1)
    body = text[match.end() :].removesuffix("</function>").strip()
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            return None
        key, value = parameter.groups()
        arguments[key] = _value(value, schemas.get(name, {}).get(key))
        at = parameter.end()
    return name, arguments


def _value(text: str, schema: object) -> Any:
    """The value that the text stands for: itself where a string is wanted, else JSON where it is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")
