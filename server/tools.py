"""Reads the tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forkpoint.server.errors import clip
from forkpoint.server.fields import Fields, json_type
from forkpoint.server.structured_schema import require_bounded

MAX_TOOLS = 128  # OpenAI's
MAX_TOOLS_BYTES = 256 * 1024
MAX_NAME_CHARS = 128
# OpenAI's characters, and the full stop of other servers' tools.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# OpenAI's names before 2024, and what they became.
_REPLACED = {"functions": "tools", "function_call": "tool_choice"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. index: of the tool in the request. parameters: a JSON schema."""

    name: str
    index: int
    parameters: Mapping[str, Any]

    @property
    def parameter_schemas(self) -> Mapping[str, Any]:
        """Those that the schema names; their values are as the client sent them."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}


@dataclass(frozen=True, slots=True)
class Tools:
    """definitions: as the client wrote them, for the template. callable: those that may be called.

    mode: none: calls are not looked for; auto: the model decides; required: at least one call.
    max_calls: most calls of one answer; None: any number.
    """

    definitions: tuple[Mapping[str, Any], ...]
    callable: tuple[Function, ...]
    mode: Literal["none", "auto", "required"]
    max_calls: int | None

    @property
    def has_forbidden(self) -> bool:
        """Whether the prompt shows functions that must not be called."""
        return len(self.callable) < len(self.definitions)


def read_tools(body: Mapping[str, object]) -> Tools | None:
    """The tools of a request; None if it has none. Raises RequestError."""
    fields = Fields(body)
    for name, replacement in _REPLACED.items():
        if fields.is_given(name) and fields.get(name) != "none":
            raise fields.error(name, f"is no longer used; give {replacement} instead")
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    if not fields.is_given("tools"):
        if fields.is_given("tool_choice") and fields.get("tool_choice") != "none":
            raise fields.error("tool_choice", "needs tools")
        return None
    definitions, functions = _read_definitions(fields)
    mode, names = _read_choice(fields, [function.name for function in functions])
    called = tuple(function for function in functions if names is None or function.name in names)
    is_named = isinstance(fields.get("tool_choice"), dict) and mode == "required" and len(called) == 1
    return Tools(definitions, called, mode, max_calls=1 if is_named or not is_parallel else None)


def _read_definitions(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], list[Function]]:
    tools = fields.get("tools")
    if not isinstance(tools, list):
        raise fields.error("tools", f"must be a list, not {json_type(tools)}")
    if not tools:
        raise fields.error("tools", "is empty; leave it out, or give at least one function")
    if len(tools) > MAX_TOOLS:
        raise fields.error("tools", f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    require_bounded(fields, "tools", tools, max_bytes=MAX_TOOLS_BYTES)
    functions = [_read_function(fields, index, tool) for index, tool in enumerate(tools)]
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise fields.error(f"tools.{index}.function.name", f"is {name}, which another tool has too")
    return tuple(tools), functions


def _read_function(fields: Fields, index: int, value: object) -> Function:
    if not isinstance(value, dict):
        raise fields.error(f"tools.{index}", f"must be an object, not {json_type(value)}")
    tool = Fields(value, f"{fields.prefix}tools.{index}.")
    if tool.get("type") != "function":
        shown = clip(repr(tool.get("type")), 60) if isinstance(tool.get("type"), str) else "missing"
        raise tool.error("type", f"is {shown}; it must be 'function'")
    function = tool.object("function")
    if function is None:
        raise tool.error("function", "is missing")
    name = function.string("name", max_chars=MAX_NAME_CHARS)
    if name is None:
        raise function.error("name", "is missing")
    if not _NAME.fullmatch(name):
        raise function.error("name", "may hold letters, digits, `_`, `-` and `.` only")
    function.string("description")
    function.boolean("strict", default=False)
    parameters = function.object("parameters")
    schema = {} if parameters is None else parameters.values
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise function.error("parameters.type", "must be 'object'")
    return Function(name, index, schema)


def _read_choice(
    fields: Fields, names: Sequence[str]
) -> tuple[Literal["none", "auto", "required"], Sequence[str] | None]:
    """How tools are chosen, and the names of those that may be called; None: all."""
    choice = fields.get("tool_choice")
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case dict():
            return _read_choice_object(Fields(choice, f"{fields.prefix}tool_choice."), names)
    shown = clip(repr(choice), 60) if isinstance(choice, str) else json_type(choice)
    raise fields.error("tool_choice", f"is {shown}; it must be none, auto, required, or name a function")


def _read_choice_object(
    choice: Fields, names: Sequence[str]
) -> tuple[Literal["none", "auto", "required"], Sequence[str] | None]:
    kind = choice.get("type")
    if kind == "function":
        return "required", [_read_known_name(choice, names)]
    if kind != "allowed_tools":
        raise choice.error("type", "must be 'function' or 'allowed_tools'")
    # In /v1/responses mode and tools stand beside the type.
    allowed = choice.object("allowed_tools") or choice
    mode = allowed.get("mode")
    if mode != "auto" and mode != "required":
        raise allowed.error("mode", "must be 'auto' or 'required'")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise allowed.error("tools", "must be a list of at least one function")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise allowed.error(f"tools.{index}", "must be an object of type 'function'")
    chosen = [
        _read_known_name(Fields(tool, f"{allowed.prefix}tools.{index}."), names)
        for index, tool in enumerate(tools)
    ]
    return "required" if mode == "required" else "auto", chosen


def _read_known_name(fields: Fields, names: Sequence[str]) -> str:
    """The name in {"function": {"name": ...}}, or beside the type."""
    holder = fields.object("function") or fields
    name = holder.string("name", max_chars=MAX_NAME_CHARS)
    if name is None:
        raise holder.error("name", "is missing")
    if name not in names:
        raise holder.error("name", f"is {clip(name, 100)!r}, which is none of the tools")
    return name
