"""The grammar of calls: exactly the model family's form, with arguments that match the function's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forkpoint.server.fields import Fields
from forkpoint.server.parsers.call_syntax import CallSyntax
from forkpoint.server.structured_rules import OutputRule, SpecialTokenId, marked_text, schema_expression
from forkpoint.server.structured_schema import read_schema
from forkpoint.server.tools import Function, Tools

# A model that is forced to call need not find an end by itself.
MAX_FORCED_CALLS = 16


def calls_rule(
    tools: Tools, syntax: CallSyntax, markers: Sequence[str], special_id: SpecialTokenId
) -> OutputRule:
    """One or more calls of the callable tools, at most MAX_FORCED_CALLS.

    Each function's schema stands by itself, since references in it count from its own root. Raises
    RequestError for a schema that cannot be enforced.
    """

    def text(part: str) -> str:
        return marked_text(part, markers, special_id)

    max_calls = 1 if syntax.is_single else min(tools.max_calls or MAX_FORCED_CALLS, MAX_FORCED_CALLS)
    more = f"({text(syntax.between)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    rules = [f"calls: {text(syntax.before)} call {more} {text(syntax.after)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools.callable))))
    for index, function in enumerate(tools.callable):
        arguments = schema_expression(_arguments_schema(function))
        start, end = text(syntax.start_of(function.name)), text(syntax.closing)
        rules.append(f"call_{index}: {start} {arguments} {end}")
    return OutputRule("calls", tuple(rules))


def _arguments_schema(function: Function) -> Mapping[str, Any]:
    schema: dict[str, Any] = {**function.parameters, "type": "object"}
    if not function.parameters:  # a function without parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return read_schema(Fields({"parameters": schema}, f"tools.{function.index}.function."), "parameters")
