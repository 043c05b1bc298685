"""Chats in the form that gpt-oss' chat template reads, which knows one call per message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# The template's name for reasoning. transformers fills it in from the other names when it renders,
# and leaves it alone where it is there already.
THINKING = "thinking"


def as_harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """New messages: each call in a message of its own with its result behind, no content beside reasoning.

    The template keeps or drops the reasoning itself. It shows the first call of a message alone, takes every
    result for one of the call before it, and refuses content beside reasoning and a call: such content, which
    the model wrote before it called, goes behind the reasoning.
    """
    result: list[Message] = []
    at = 0
    while at < len(messages):
        message = _without_content_beside_reasoning(messages[at])
        at += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            result.append(message)
            continue
        tool_messages = []
        while at < len(messages) and messages[at]["role"] == "tool":
            tool_messages.append(messages[at])
            at += 1
        result += _one_by_one(message, calls, tool_messages)
    return result


def as_harmony_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """New definitions; the template writes every description, and fails where there is none."""
    return tuple({**tool, "function": {"description": "", **tool["function"]}} for tool in tools)


def _without_content_beside_reasoning(message: Message) -> Message:
    thinking = message.get("reasoning_content") or message.get("reasoning")
    if not thinking:
        return message
    content = message.get("content")
    if not content or not message.get("tool_calls"):
        return message
    reasoning = f"{thinking}\n{_text(content)}"
    kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    return {**kept, "content": None, THINKING: reasoning}


def _one_by_one(
    message: Message, calls: Sequence[Mapping[str, Any]], results: Sequence[Message]
) -> list[Message]:
    """Each call with its results; the first keeps the rest of the message, the last what answers no call."""
    ordered: list[Message] = []
    for index, call in enumerate(calls):
        first = message if index == 0 else {"role": "assistant"}
        ordered.append({**first, "tool_calls": [call]})
        ordered += [each for each in results if each["tool_call_id"] == call.get("id")]
    call_ids = {call.get("id") for call in calls}
    return [*ordered, *(each for each in results if each["tool_call_id"] not in call_ids)]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
