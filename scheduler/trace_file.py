"""Reads a trace: JSON lines of {"id", "prompt": [ids], "output": [ids], "anchors": [positions]}.

Only `prompt` must be there. Without an output, a request ends right after its prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from forkpoint.configs.errors import ConfigError
from forkpoint.scheduler.traces import Tokens, TraceRequest

MAX_TOKEN = 2**31 - 1
FIELDS = ("id", "prompt", "output", "anchors")
_HINT = '--trace takes JSON lines of {"id", "prompt": [ids], "output": [ids], "anchors": [positions]}'


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, in its order; blank lines are skipped. Raises ConfigError, with the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror}", hint=_HINT) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_request(orjson.loads(line), number))
            except ValueError as error:  # orjson's error is one too
                raise ConfigError(f"{path} line {number}: {error}", hint=_HINT) from error
    if not requests:
        raise ConfigError(f"--trace {path} holds no request", hint=_HINT)
    return requests


def _request(entry: Any, number: int) -> TraceRequest:
    """One line's request. Raises ValueError; its text is for people."""
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    unknown = sorted(entry.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"field {unknown[0]!r} is unknown; the fields are {', '.join(FIELDS)}")
    identity = entry.get("id", str(number))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise ValueError("id is neither text nor a whole number")
    prompt = _whole_numbers(entry, "prompt", most=MAX_TOKEN)
    if not len(prompt):
        raise ValueError("prompt is missing or empty; it needs at least one token id")
    output = _whole_numbers(entry, "output", most=MAX_TOKEN)
    anchors = _whole_numbers(entry, "anchors", most=len(prompt))
    return TraceRequest(str(identity), prompt, output, tuple(sorted(set(anchors.tolist()))))


def _whole_numbers(entry: dict[str, Any], field: str, *, most: int) -> Tokens:
    values = entry.get(field, [])
    if not isinstance(values, list):
        raise ValueError(f"{field} is no list")
    # One pass in C over the types: a prompt may have 100,000 ids.
    if not set(map(type, values)) <= {int}:
        raise ValueError(f"{field} holds something else than whole numbers")
    for value in (min(values, default=0), max(values, default=0)):
        if not 0 <= value <= most:
            raise ValueError(f"{field} holds {value}; it must be 0 to {most}")
    return np.array(values, dtype=np.int32)
