"""Validates the messages of a chat request and brings them into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from forkpoint.configs.errors import RequestError
from forkpoint.server.errors import clip
from forkpoint.server.fields import Fields, json_type

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def read_messages(value: object, *, max_pieces: int) -> list[Message]:
    """The messages for the template. Raises RequestError with param `messages.0.content` and the like.

    One text part becomes a plain string; several stay parts, and the template's own rule joins them.
    `developer` becomes `system`, which every template knows.

    max_pieces: most messages, content parts and tool calls together. Empty ones pass every bound on
        characters, and reading and rendering a body full of them took 20 s (November 2026).
    """
    if not isinstance(value, list):
        raise RequestError(f"messages must be a list, not {json_type(value)}", param="messages")
    if not value:
        raise RequestError("messages is empty; it must hold at least one message", param="messages")
    num_pieces = len(value)
    if num_pieces <= max_pieces:  # else there is no need to look into each of a million
        num_pieces += sum(map(_num_parts, value))
    if num_pieces > max_pieces:
        raise RequestError(
            f"messages has {num_pieces} messages, content parts and tool calls; the context of this model "
            f"allows {max_pieces} (--context-length)",
            param="messages",
            code="context_length_exceeded",
        )
    return [_read_message(message, f"messages.{i}") for i, message in enumerate(value)]


def num_characters(messages: Sequence[Message]) -> int:
    """Characters of the contents: the rendered text has at least as many. For the cheap length check."""
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            count += len(content)
        elif isinstance(content, list):
            count += sum(len(part["text"]) for part in content)
    return count


def _num_parts(message: object) -> int:
    if not isinstance(message, dict):
        return 0
    lists = (message.get("content"), message.get("tool_calls"))
    return sum(len(value) for value in lists if isinstance(value, list))


def _read_message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"{path} must be an object, not {json_type(value)}", param=path)
    fields = Fields(value, f"{path}.")
    role = fields.get("role")
    if role not in ROLES:
        shown = clip(repr(role), 60) if isinstance(role, str) else json_type(role)
        raise fields.error("role", f"is {shown}; it must be one of {', '.join(ROLES)}")
    message: Message = {"role": "system" if role == "developer" else role}
    tool_calls = _read_tool_calls(fields) if role == "assistant" else []
    if tool_calls:
        message["tool_calls"] = tool_calls
    refusal = fields.string("refusal") if role == "assistant" else None
    if refusal and not fields.is_given("content"):
        message["content"] = refusal  # it is what the assistant said
    elif fields.is_given("content") or not tool_calls:
        message["content"] = _read_content(fields)
    else:
        message["content"] = None
    if role == "tool":
        tool_call_id = fields.string("tool_call_id")
        if not tool_call_id:
            raise fields.error("tool_call_id", "is missing; a tool message must name the call it answers")
        message["tool_call_id"] = tool_call_id
    for name in ("name", "reasoning_content", "reasoning"):
        text = fields.string(name)
        if text is not None:
            message[name] = text
    return message


def _read_content(fields: Fields) -> str | list[dict[str, str]]:
    value = fields.get("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.error("content", f"must be a string or a list of text parts, not {json_type(value)}")
    if not value:
        raise fields.error("content", "is an empty list; it must hold at least one text part")
    texts = [_read_text_part(fields, i, part) for i, part in enumerate(value)]
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _read_text_part(fields: Fields, index: int, part: object) -> str:
    name = f"content.{index}"
    if not isinstance(part, dict):
        raise fields.error(name, f"must be an object, not {json_type(part)}")
    if part.get("type") != "text":
        shown = clip(repr(part.get("type")), 60) if isinstance(part.get("type"), str) else "missing"
        raise fields.error(f"{name}.type", f"is {shown}; this model takes only parts of type 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise fields.error(f"{name}.text", f"must be a string, not {json_type(text)}")
    return text


def _read_tool_calls(fields: Fields) -> list[dict[str, Any]]:
    value = fields.get("tool_calls")
    if value is None:
        return []
    if not isinstance(value, list):
        raise fields.error("tool_calls", f"must be a list, not {json_type(value)}")
    return [_read_tool_call(call, f"{fields.prefix}tool_calls.{i}") for i, call in enumerate(value)]


def _read_tool_call(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{path} must be an object, not {json_type(value)}", param=path)
    fields = Fields(value, f"{path}.")
    if fields.get("type") not in (None, "function"):
        raise fields.error("type", "must be 'function'")
    function = fields.object("function")
    if function is None:
        raise fields.error("function", "is missing")
    name = function.string("name")
    if not name:
        raise function.error("name", "is missing")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _parsed_arguments(function.get("arguments"))},
    }
    call_id = fields.string("id")
    return call if call_id is None else {"id": call_id, **call}


def _parsed_arguments(arguments: object) -> object:
    """Templates write arguments as JSON themselves: a string that holds an object is handed over as one."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
