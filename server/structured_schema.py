"""Checks JSON schemas of requests before anything recursive reads them; prepares them for the grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from forkpoint.server.fields import Fields

# llguidance's reader stops at 128 levels of JSON, of which a grammar's own text takes a few.
MAX_SCHEMA_DEPTH = 96
MAX_SCHEMA_VALUES = 20_000
MAX_SCHEMA_BYTES = 128 * 1024

# At most one space between tokens of JSON: a small model would fill its budget with blanks. llguidance lets a
# schema set this and more (`lenient` would make it skip keywords), so ours replaces what a client might send.
_WRITING = {"whitespace_flexible": False, "whitespace_pattern": r"[\x20]"}
_WRITING_KEY = "x-guidance"

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples", "example", "required", "type")
# Keywords of older drafts that llguidance takes for annotations: the answer would not be bound by them.
_SILENTLY_IGNORED = ("additionalItems", "disallow", "divisibleBy", "extends")


def read_schema(fields: Fields, name: str) -> dict[str, Any]:
    """The schema in field `name`, ready for a grammar. Raises RequestError.

    Whether llguidance can follow it is found out when the grammar is compiled.
    """
    schema = fields.get(name)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise fields.error(name, "must be a JSON schema, that is an object")
    require_bounded(fields, name, schema, max_bytes=MAX_SCHEMA_BYTES)
    if _WRITING_KEY in schema:
        raise fields.error(name, f"has the key {_WRITING_KEY}, which only the server may set")
    for each in _schemas_in(schema):
        _require_known_keywords(fields, name, each)
    _require_no_reference_cycle(fields, name, schema)
    return {**schema, _WRITING_KEY: _WRITING}


def require_bounded(fields: Fields, name: str, value: object, *, max_bytes: int) -> None:
    """Raise RequestError if a JSON value is too deep or too large for recursive readers."""
    level: list[object] = [value]
    num_values = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        num_values += len(level)
        if num_values > MAX_SCHEMA_VALUES:
            raise fields.error(name, f"has more than {MAX_SCHEMA_VALUES} values")
        level = [child for each in level for child in _children(each)]
        if not level:
            break
    else:
        raise fields.error(name, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    num_bytes = len(orjson.dumps(value))
    if num_bytes > max_bytes:
        raise fields.error(name, f"has {num_bytes} bytes; at most {max_bytes} are allowed")


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _schemas_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and every schema in it; no data, and no names of properties."""
    todo: list[object] = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        if not isinstance(value, dict):
            continue
        yield value
        for key, child in value.items():
            if key in _MAPS_OF_SCHEMAS and isinstance(child, dict):
                todo += child.values()
            elif key not in _DATA:
                todo.append(child)


def _require_known_keywords(fields: Fields, name: str, schema: Mapping[str, Any]) -> None:
    for keyword in _SILENTLY_IGNORED:
        if keyword in schema:
            raise fields.error(name, f"uses the keyword {keyword}, which is not supported")
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(keyword), bool):
            raise fields.error(name, f"uses {keyword} as draft 4 does; give the number instead of a boolean")
    if isinstance(schema.get("items"), list):
        raise fields.error(name, "uses items with a list; give it as prefixItems")


def _require_no_reference_cycle(fields: Fields, name: str, schema: Mapping[str, Any]) -> None:
    """A reference that leads to itself and nowhere else matches nothing at all."""
    ending: set[int] = set()
    for start in _schemas_in(schema):
        chain: dict[int, object] = {}
        node: object = start
        while isinstance(node, dict) and isinstance(node.get("$ref"), str) and id(node) not in ending:
            if id(node) in chain:
                raise fields.error(name, f"has a $ref that only leads to itself: {node['$ref'][:100]}")
            chain[id(node)] = node
            node = _target(schema, node["$ref"])
        ending.update(chain)


def _target(schema: Mapping[str, Any], reference: str) -> object:
    """What a reference inside of the schema points to; None if it is no such reference, or a wrong one."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: object = schema
    for part in reference[2:].split("/") if reference != "#" else ():
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and len(key) < 6 and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
