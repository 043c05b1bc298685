"""Tools for chat templates that know none: described in a system text; calls and results as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from forkpoint.server.chat_messages import Message
from forkpoint.server.parsers.formats import JSON_SYNTAX

_INSTRUCTIONS = """\
You can call these functions, given as JSON, one on each line:
{functions}

To call one, answer with nothing but a JSON object of this form, one on each line for several calls:
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
Their results are given to you in the next message. If no function is needed, answer as usual."""


def described(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, knows_system: bool
) -> list[Message]:
    """New messages that tell of the tools, behind the system text that is there.

    knows_system: whether the template has a place for a system text; else it goes before the first user's.
    """
    functions = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    text = _INSTRUCTIONS.format(functions=functions)
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": _joined(first["content"], text)}, *messages[1:]]
    if knows_system:
        return [{"role": "system", "content": text}, *messages]
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return [{"role": "user", "content": text}, *messages]
    question = {**messages[index], "content": _joined(text, messages[index]["content"])}
    return [*messages[:index], question, *messages[index + 1 :]]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """New messages in which calls are the text that the model wrote, and results are told by the user.

    Results that follow each other, and what the user says then, become one message: many templates want
    users and assistants to take turns.
    """
    names: dict[str, str] = {}
    result: list[Message] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = message.get("name") or names.get(message["tool_call_id"], message["tool_call_id"])
            message = {"role": "user", "content": _joined(f"Result of {name}:", message["content"], "\n")}
        elif calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            message = _with_written_calls(message, calls)
        if is_after_result and message["role"] == "user":
            content = _joined(result[-1]["content"], message["content"])
            result[-1] = {**result[-1], "content": content}
        else:
            result.append(message)
        is_after_result = is_result
    return result


def _with_written_calls(message: Message, calls: Sequence[Mapping[str, Any]]) -> Message:
    written = JSON_SYNTAX.between.join(
        JSON_SYNTAX.start_of(call["function"]["name"])
        + _written_arguments(call["function"]["arguments"])
        + JSON_SYNTAX.closing
        for call in calls
    )
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    return {**kept, "content": _joined(content, written, "\n") if content else written}


def _written_arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _joined(one: Any, other: Any, between: str = "\n\n") -> Any:
    """Two contents, each a string or a list of text parts."""
    if isinstance(one, str) and isinstance(other, str):
        return one + between + other
    parts = [*_parts(one), *_parts(other)]
    return parts


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
