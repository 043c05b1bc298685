"""Schemas of answers: what the server promises to send."""

from __future__ import annotations

from typing import Any

from forkpoint.server.openapi_requests import Schema, nullable

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_UNIX_TIME: Schema = {"type": "integer", "minimum": 0, "description": "Unix time in seconds."}
_FINISH_REASONS = ["stop", "length", "tool_calls"]


def answer_schemas() -> dict[str, Schema]:
    """By name, for `components`."""
    return {
        "Error": _closed(
            {
                "error": _closed(
                    {"message": _TEXT, "type": _TEXT, "param": nullable(_TEXT), "code": nullable(_TEXT)}
                )
            }
        ),
        "Usage": _closed(
            {
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "total_tokens": _COUNT,
                "prompt_tokens_details": _closed({"cached_tokens": _COUNT, "rebuilt_tokens": _COUNT}),
                "completion_tokens_details": _closed({"reasoning_tokens": _COUNT}),
            }
        ),
        "ChatCompletion": _answer("chat.completion", "^chatcmpl-", _chat_choice()),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", "^chatcmpl-", _chat_delta()),
        "Completion": _answer("text_completion", "^cmpl-", _text_choice(is_whole=True)),
        "CompletionChunk": _chunk("text_completion", "^cmpl-", _text_choice(is_whole=False)),
        "Model": _MODEL,
        "ModelList": _closed({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}),
        "Tokens": _closed(
            {"tokens": {"type": "array", "items": _COUNT}, "count": _COUNT, "max_model_len": _COUNT}
        ),
        "Text": _closed({"prompt": _TEXT, "text": _TEXT}),
        "Status": _closed({"status": {"const": "ok"}}),
        "Version": _closed({"version": _TEXT}),
        "Success": _closed({"success": {"const": True}}),
        "Aborted": _closed({"success": {"const": True}, "num_aborted": _COUNT}),
        "Object": {"type": "object"},
    }


def _closed(properties: dict[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _answer(object_name: str, id_pattern: str, choice: Schema) -> Schema:
    return _closed({**_head(object_name, id_pattern), "choices": _list(choice), "usage": _ref("Usage")})


def _chunk(object_name: str, id_pattern: str, choice: Schema) -> Schema:
    usage = {"anyOf": [_ref("Usage"), {"type": "null"}]}
    properties = {**_head(object_name, id_pattern), "choices": _list(choice), "usage": usage}
    return _closed(properties, optional=("usage",))


def _head(object_name: str, id_pattern: str) -> dict[str, Schema]:
    return {
        "id": {"type": "string", "pattern": id_pattern},
        "object": {"const": object_name},
        "created": _UNIX_TIME,
        "model": _TEXT,
    }


def _ending(*, is_whole: bool) -> dict[str, Schema]:
    reasons: list[Any] = _FINISH_REASONS if is_whole else [*_FINISH_REASONS, None]
    return {"finish_reason": {"enum": reasons}, "stop_reason": {"type": ["string", "integer", "null"]}}


def _chat_choice() -> Schema:
    message = _closed(
        {
            "role": {"const": "assistant"},
            "content": nullable(_TEXT),
            "refusal": {"type": "null"},
            "reasoning_content": _TEXT,
            "tool_calls": _list(_closed({"id": _TEXT, "type": {"const": "function"}, "function": _CALL})),
        },
        optional=("reasoning_content", "tool_calls"),
    )
    return _closed(
        {"index": _COUNT, "message": message, "logprobs": _chat_logprobs(), **_ending(is_whole=True)}
    )


def _chat_delta() -> Schema:
    call = _closed(
        {
            "index": _COUNT,
            "id": _TEXT,
            "type": {"const": "function"},
            "function": {**_CALL, "required": ["arguments"]},
        },
        optional=("id", "type"),
    )
    delta = _closed(
        {
            "role": {"const": "assistant"},
            "content": _TEXT,
            "reasoning_content": _TEXT,
            "tool_calls": _list(call),
        },
        optional=("role", "content", "reasoning_content", "tool_calls"),
    )
    choice = {"index": _COUNT, "delta": delta, "logprobs": _chat_logprobs(), **_ending(is_whole=False)}
    return _closed(choice, optional=("stop_reason",))


def _chat_logprobs() -> Schema:
    token = {
        "token": _TEXT,
        "logprob": {"type": "number"},
        "bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    }
    entry = _closed({**token, "top_logprobs": _list(_closed(dict(token)))})
    return {"anyOf": [_closed({"content": _list(entry), "refusal": {"type": "null"}}), {"type": "null"}]}


def _text_choice(*, is_whole: bool) -> Schema:
    columns = _closed(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": {"type": "number"}}),
            "text_offset": _list(_COUNT),
        }
    )
    logprobs = {"anyOf": [columns, {"type": "null"}]}
    return _closed({"index": _COUNT, "text": _TEXT, "logprobs": logprobs, **_ending(is_whole=is_whole)})


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_CALL = _closed({"name": _TEXT, "arguments": _TEXT})
_MODEL = _closed(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _UNIX_TIME,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
    }
)
