"""Schemas of request bodies, made from the constants that the server validates with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkpoint.configs.sampling import MAX_SEED, MIN_SEED
from forkpoint.server.admin_api import MAX_ABORTED_IDS
from forkpoint.server.chat_messages import ROLES
from forkpoint.server.completions import DEFAULT_MAX_TOKENS
from forkpoint.server.generation_fields import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_INT,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
)
from forkpoint.server.prompts import MAX_PROMPTS
from forkpoint.server.rendering import MAX_TEMPLATE_KWARGS
from forkpoint.server.structured import (
    MAX_CHOICE_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
)
from forkpoint.server.structured import MAX_CHOICES as MAX_OUTPUT_CHOICES
from forkpoint.server.tokenization import MAX_DETOKENIZED
from forkpoint.server.tools import MAX_NAME_CHARS, MAX_TOOLS

Schema = dict[str, Any]


def request_schemas() -> dict[str, Schema]:
    """By name, for `components`. Unknown fields are ignored; null counts as absent."""
    return {
        "Message": _message(),
        "Tool": _tool(),
        "ChatCompletionRequest": _body({**_generation(), **_chat()}, required=("messages",)),
        "CompletionRequest": _body({**_generation(), **_completion()}, required=("prompt",)),
        "TokenizeChatRequest": _tokenize_chat(),
        "TokenizePromptRequest": _tokenize_prompt(),
        "TokenizeRequest": {
            "anyOf": [
                {"$ref": "#/components/schemas/TokenizeChatRequest"},
                {"$ref": "#/components/schemas/TokenizePromptRequest"},
            ]
        },
        "DetokenizeRequest": _body(
            {
                "model": _MODEL,
                "tokens": {
                    "type": "array",
                    "items": _TOKEN_ID,
                    "maxItems": MAX_DETOKENIZED,
                },
            },
            required=("tokens",),
        ),  # fmt: skip
        "AbortRequest": _body(
            {
                "request_id": nullable({"type": "string"}),
                "rid": nullable({"type": "string"}),
                "request_ids": nullable(
                    {"type": "array", "items": {"type": "string"}, "maxItems": MAX_ABORTED_IDS}
                ),
            },
            required=(),
        ),
    }


def nullable(schema: Schema) -> Schema:
    """The same or null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _body(properties: Mapping[str, Schema], *, required: tuple[str, ...]) -> Schema:
    schema: Schema = {"type": "object", "properties": dict(properties)}
    return {**schema, "required": list(required)} if required else schema


def _integer(low: int, high: int = MAX_INT, **more: Any) -> Schema:
    return nullable({"type": "integer", "minimum": low, "maximum": high, **more})


def _number(low: float, high: float, **more: Any) -> Schema:
    return nullable({"type": "number", "minimum": low, "maximum": high, **more})


def _flag(*, default: bool) -> Schema:
    return nullable({"type": "boolean", "default": default})


def _generation() -> dict[str, Schema]:
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {
        "model": _MODEL,
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1, description="Wins over max_tokens."),
        "min_tokens": _integer(0, description="At most max_tokens."),
        "n": _integer(1, MAX_CHOICES, default=1),
        "temperature": _number(0.0, MAX_TEMPERATURE),
        "top_p": nullable({"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}),
        "top_k": _integer(-1, description="0 and -1 are off."),
        "min_p": _number(0.0, 1.0),
        "seed": _integer(MIN_SEED, MAX_SEED),
        "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY, default=0.0),
        "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY, default=0.0),
        "repetition_penalty": _number(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "logit_bias": nullable(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,20}$"},
                "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
                "maxProperties": MAX_LOGIT_BIASES,
            }
        ),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        "stop_token_ids": nullable({"type": "array", "items": _TOKEN_ID, "maxItems": MAX_STOP_TOKEN_IDS}),
        "ignore_eos": _flag(default=False),
        "include_stop_str_in_output": _flag(default=False),
        "skip_special_tokens": _flag(default=True),
        "stream": _flag(default=False),
        "stream_options": nullable(
            {
                "type": "object",
                "properties": {
                    "include_usage": _flag(default=False),
                    "continuous_usage_stats": _flag(default=False),
                },
                "description": "With `stream: true` only.",
            }
        ),
        "cache_salt": nullable({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}),
        "response_format": nullable(_response_format()),
        "structured_outputs": nullable(_structured_outputs()),
    }


def _chat() -> dict[str, Schema]:
    return {
        "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
        "logprobs": _flag(default=False),
        "top_logprobs": _integer(0, MAX_LOGPROBS, description="With `logprobs: true` only."),
        "tools": nullable(
            {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Tool"},
                "minItems": 1,
                "maxItems": MAX_TOOLS,
            }
        ),
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {"type": "object", "properties": {"type": {"enum": ["function", "allowed_tools"]}}},
                {"type": "null"},
            ],
            "description": "With tools only.",
        },
        "parallel_tool_calls": _flag(default=True),
        "reasoning_effort": nullable({"type": "string"}),
        **_rendering(),
    }


def _rendering() -> dict[str, Schema]:
    return {
        "add_generation_prompt": nullable({"type": "boolean"}),
        "continue_final_message": _flag(default=False),
        "add_special_tokens": nullable({"type": "boolean"}),
        "chat_template_kwargs": nullable({"type": "object", "maxProperties": MAX_TEMPLATE_KWARGS}),
    }


def _completion() -> dict[str, Schema]:
    ids: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
    several = {"minItems": 1, "maxItems": MAX_PROMPTS}
    return {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, **several},
                ids,
                {"type": "array", "items": ids, **several},
            ]
        },
        "max_tokens": _integer(0, default=DEFAULT_MAX_TOKENS, description="0 with `echo: true` only."),
        "max_completion_tokens": _integer(0, description="Wins over max_tokens; 0 with `echo: true` only."),
        "logprobs": {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
                {"const": False},
                {"type": "null"},
            ]
        },
        "echo": _flag(default=False),
        "add_special_tokens": _flag(default=True),
    }


def _tokenize_chat() -> Schema:
    chat = _chat()
    names = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
    return _body(
        {"model": _MODEL, **{name: chat[name] for name in names}, **_rendering()}, required=("messages",)
    )


def _tokenize_prompt() -> Schema:
    """What a chat has beside its messages is not looked at."""
    properties = {"model": _MODEL, "prompt": {"type": "string"}, "add_special_tokens": _flag(default=True)}
    return _body({**properties, "messages": {"type": "null"}}, required=("prompt",))


def _message() -> Schema:
    text = {"type": "string"}
    part = _body({"type": {"const": "text"}, "text": text}, required=("type", "text"))
    function = _body({"name": {"type": "string", "minLength": 1}, "arguments": {}}, required=("name",))
    call = _body(
        {
            "id": nullable(text),
            "type": {"enum": ["function", None]},
            "function": function,
        },
        required=("function",),
    )
    content = {"anyOf": [text, {"type": "array", "items": part, "minItems": 1}]}
    names = {name: nullable(text) for name in ("name", "reasoning_content", "reasoning")}
    plain = [role for role in ROLES if role not in ("assistant", "tool")]
    calls: Schema = {"type": "array", "items": call}
    return {
        "anyOf": [
            _body({"role": {"enum": plain}, "content": content, **names}, required=("role", "content")),
            _body(
                {"role": {"const": "assistant"}, "content": content, "tool_calls": nullable(calls), **names},
                required=("role", "content"),
            ),
            _body(
                {
                    "role": {"const": "assistant"},
                    "content": nullable(content),
                    "tool_calls": {**calls, "minItems": 1},
                    **names,
                },
                required=("role", "tool_calls"),
            ),
            _body(
                {
                    "role": {"const": "tool"},
                    "content": content,
                    "tool_call_id": {"type": "string", "minLength": 1},
                    **names,
                },
                required=("role", "content", "tool_call_id"),
            ),
        ]
    }


def _tool() -> Schema:
    function = _body(
        {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$", "maxLength": MAX_NAME_CHARS},
            "description": nullable({"type": "string"}),
            "strict": nullable({"type": "boolean"}),
            "parameters": nullable({"type": "object", "properties": {"type": {"const": "object"}}}),
        },
        required=("name",),
    )
    return _body({"type": {"const": "function"}, "function": function}, required=("type", "function"))


def _response_format() -> Schema:
    schema = _body(
        {"schema": {"type": ["object", "boolean"]}, "strict": nullable({"type": "boolean"})},
        required=("schema",),
    )
    return {
        "anyOf": [
            _body({"type": {"enum": ["text", "json_object"]}}, required=("type",)),
            _body(
                {"type": {"const": "json_schema"}, "json_schema": schema}, required=("type", "json_schema")
            ),
        ]
    }


def _structured_outputs() -> Schema:
    choice = {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_CHOICE_CHARS},
        "minItems": 1,
        "maxItems": MAX_OUTPUT_CHOICES,
    }
    kinds: dict[str, Schema] = {
        "json": {"type": ["object", "boolean", "string"]},
        "json_object": {"type": "boolean"},
        "regex": {"type": "string", "minLength": 1, "maxLength": MAX_REGEX_CHARS},
        "choice": choice,
        "grammar": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARS},
    }
    return {
        "type": "object",
        "properties": {name: nullable(kind) for name, kind in kinds.items()},
        "additionalProperties": False,
        "description": "One of them.",
    }


_MODEL: Schema = {
    "type": ["string", "null"],
    "description": "A name of /v1/models; the first of them if it is absent.",
}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
