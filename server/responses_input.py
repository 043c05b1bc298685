"""Reads the body of a /v1/responses request: what is built of it, and a refusal by name of what is not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from forkpoint.configs.errors import RequestError
from forkpoint.server.chat_messages import Message, read_messages
from forkpoint.server.fields import Fields, json_type

_MAX_INT = 2**63 - 1
# Fields that /v1/responses shares with chat, the extra ones of vLLM and SGLang included.
_SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "cache_salt", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
# Known fields whose features are not built, with the values beside null that ask for nothing.
_UNBUILT: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),  # nothing is stored: send the whole conversation as `input`
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),  # nothing is ever cut off a prompt
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "context_management": ([],),
}
_MESSAGE_INDEX = re.compile(r"messages\.(\d+)")
_TEXT_PARTS = ("input_text", "output_text", "text")


def as_chat_body(body: Mapping[str, object]) -> dict[str, object]:
    """The fields of sampling, length and streaming, under the names that chat has. Raises RequestError."""
    fields = Fields(body)
    shared = {name: body[name] for name in _SHARED if name in body}
    return shared | {"max_tokens": fields.integer("max_output_tokens", low=1, high=_MAX_INT)}


def read_reasoning_effort(body: Mapping[str, object]) -> str | None:
    reasoning = Fields(body).object("reasoning")
    return None if reasoning is None else reasoning.string("effort")


def refuse_unbuilt_response_fields(body: Mapping[str, object]) -> None:
    """Raise RequestError naming the first field that asks for what a stateless server of texts has not."""
    for name, neutral_values in _UNBUILT.items():
        value = body.get(name)
        if value is not None and not any(
            type(value) is type(each) and value == each for each in neutral_values
        ):
            raise _unsupported(name)


def as_response_format(body: Mapping[str, object]) -> dict[str, object]:
    """`text.format` as the chat field that asks for the same; empty if there is none. Raises RequestError."""
    text = Fields(body).object("text")
    wanted = None if text is None else text.object("format")
    if wanted is None:
        return {}
    if wanted.get("type") != "json_schema":
        return {"response_format": wanted.values}
    named = {name: wanted.get(name) for name in ("name", "schema", "strict")}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@contextmanager
def errors_of_text_format() -> Iterator[None]:
    """Gives errors about chat's response_format the names that its parts have in this API."""
    try:
        yield
    except RequestError as error:
        old, new = "response_format", "text.format"
        message = str(error).replace(f"{old}.json_schema", new).replace(old, new)
        param = error.param and error.param.replace(f"{old}.json_schema", new).replace(old, new)
        raise RequestError(message, status=error.status, param=param, code=error.code) from None


def read_input(body: Mapping[str, object], *, max_pieces: int) -> list[Message]:
    """`instructions` and `input` as chat messages. Raises RequestError (param `input.0.content` etc.)."""
    value = body.get("input")
    if isinstance(value, str):
        if not value:
            raise RequestError("input is empty", param="input")
        messages: list[Message] = [{"role": "user", "content": value}]
    elif isinstance(value, list):
        messages = _read_items(value, max_pieces)
    else:
        raise RequestError(
            f"input must be a string or a list of messages, not {json_type(value)}", param="input"
        )
    instructions = Fields(body).string("instructions")
    return messages if not instructions else _with_instructions(instructions, messages)


def _read_items(items: list[object], max_pieces: int) -> list[Message]:
    messages: list[object] = []
    indices: list[int] = []  # of the items that the messages come from
    thoughts: list[str] = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thoughts += _reasoning_texts(Fields(item, f"input.{index}."))
            continue
        message = _as_message(item, index)
        if thoughts and isinstance(message, dict) and message.get("role") == "assistant":
            message["reasoning_content"] = "".join(thoughts)
        thoughts = []
        messages.append(message)
        indices.append(index)
    try:
        return read_messages(messages, max_pieces=max_pieces)
    except RequestError as error:  # about chat messages, which are called something else here
        message_text = _renamed(str(error), indices)
        param = error.param and _renamed(error.param, indices)
        raise RequestError(message_text, param=param, code=error.code) from None


def _renamed(text: str, indices: Sequence[int]) -> str:
    text = _MESSAGE_INDEX.sub(lambda match: f"input.{indices[int(match[1])]}", text, count=1)
    return text.replace("messages", "input", 1) if text.startswith("messages") else text


def _reasoning_texts(item: Fields) -> list[str]:
    """What a model thought in an earlier response; the same texts that it came with."""
    content = item.get("content")
    if content is None:
        return []
    if not isinstance(content, list):
        raise item.error("content", f"must be a list of parts, not {json_type(content)}")
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise item.error("content", "must hold parts with a text")
    return [text for text in texts if isinstance(text, str)]


def _as_message(item: object, index: int) -> object:
    """The item as a chat message; what is no message at all is left to read_messages to refuse."""
    if not isinstance(item, dict):
        return item
    if item.get("type", "message") != "message":
        shown = item["type"] if isinstance(item["type"], str) else json_type(item["type"])
        raise RequestError(
            f"input.{index}.type is {shown[:60]!r}; this server takes messages and reasoning",
            param=f"input.{index}.type",
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [_as_part(part) for part in content]
    return {"role": item.get("role"), "content": content}


def _as_part(part: object) -> object:
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    return part


def _with_instructions(instructions: str, messages: list[Message]) -> list[Message]:
    """The instructions as the beginning of the one system message: many templates refuse a second one."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    content: Any = messages[0]["content"]
    if isinstance(content, str):
        content = f"{instructions}\n\n{content}"
    else:
        content = [{"type": "text", "text": instructions}, *content]
    return [{"role": "system", "content": content}, *messages[1:]]


def _unsupported(name: str) -> RequestError:
    return RequestError(
        f"{name} is not supported by this server, which keeps no responses and runs no tools; leave it out",
        param=name,
        code="unsupported_parameter",
    )
