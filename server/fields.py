"""Typed reading of a request's fields: the value, its default, or a RequestError that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a request. A field that is null counts as absent.

    prefix: dotted path of the object inside the request, for `param` (`stream_options.`).
    Every method raises RequestError for a value of the wrong type or out of range.
    """

    values: Mapping[str, object]
    prefix: str = ""

    def get(self, name: str) -> object:
        return self.values.get(name)

    def is_given(self, name: str) -> bool:
        return self.values.get(name) is not None

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {json_type(value)}")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """Booleans and 1.0 are not integers. orjson reads integers beyond 64 bits as floats: also refused."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int:
            raise self.error(name, f"must be an integer that fits in 64 bits, not {json_type(value)}")
        if not low <= value <= high:
            # An upper bound of 64 bits says nothing to a reader.
            is_open = value < low and high >= 2**63 - 1
            bounds = f"at least {low}" if is_open else f"in [{low}, {high}]"
            raise self.error(name, f"is {value}; it must be {bounds}")
        return value

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {json_type(value)}")
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(name, f"is {value:g}; it must be in [{low:g}, {high:g}]")
        return float(value)

    def string(self, name: str, *, max_chars: int | None = None) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {json_type(value)}")
        if max_chars is not None and not 1 <= len(value) <= max_chars:
            raise self.error(name, f"has {len(value)} characters; it must have 1 to {max_chars}")
        return value

    def object(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {json_type(value)}")
        return Fields(value, f"{self.prefix}{name}.")

    def error(self, name: str, problem: str) -> RequestError:
        """A 400 about one field: `problem` continues the sentence that begins with its path."""
        param = self.prefix + name
        return RequestError(f"{param} {problem}", param=param)


def json_type(value: object) -> str:
    """What a JSON reader would call this value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a fraction or a number beyond 64 bits"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
