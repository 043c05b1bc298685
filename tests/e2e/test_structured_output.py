"""Structured output and forced calls of a random model: always valid, whatever the temperature."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.served import ServedModel, serve_ready

# Bounded in every part, so that a random model comes to an end.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "link": {
            "type": "object",
            "properties": {"is_last": {"type": "boolean"}},
            "required": ["is_last"],
            "additionalProperties": False,
        }
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "get_weather_now"}}
TOOLS = [WEATHER, NOW]
TEMPERATURES = (0.0, 1.0, 2.0)


@pytest.fixture(scope="module")
def letters(letters_dir: Path) -> Iterator[ServedModel]:
    with serve_ready(letters_dir, "--page-size", "4", "--max-total-tokens", "40000") as served:
        yield served


def choices_of(served: ServedModel, *, is_stream: bool, **body: Any) -> list[dict[str, Any]]:
    """Per choice content, calls (name, arguments) and finish_reason, put together from a stream or not."""
    body = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 400, "seed": 7, **body}
    if not is_stream:
        answer = served.openai.chat.completions.create(model=served.model, **body)
        return [
            {
                "content": choice.message.content or "",
                "calls": [
                    (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
                ],
                "finish_reason": choice.finish_reason,
            }
            for choice in answer.choices
        ]
    parts: dict[int, dict[str, Any]] = {}
    for chunk in served.openai.chat.completions.create(model=served.model, stream=True, **body):
        for choice in chunk.choices:
            part = parts.setdefault(choice.index, {"content": "", "calls": [], "finish_reason": None})
            part["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name is not None:
                    assert call.id.startswith("call_") and call.type == "function"
                    part["calls"].append((call.function.name, ""))
                name, arguments = part["calls"][call.index]
                part["calls"][call.index] = (name, arguments + call.function.arguments)
            part["finish_reason"] = choice.finish_reason or part["finish_reason"]
    return [parts[index] for index in sorted(parts)]


def check_schema(text: str, schema: dict[str, Any]) -> None:
    assert not re.search(r"[ \n\t]{2}", text.replace("\\n", "")) or '"' in text
    jsonschema_rs.validator_for(schema).validate(json.loads(text))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_schema_is_kept_in_every_choice_streamed_or_not_beside_free_requests(
    letters: ServedModel, temperature: float
) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        free = pool.submit(letters.complete, "free", max_tokens=200, temperature=1, ignore_eos=True)
        answers = [
            choices_of(
                letters, is_stream=is_stream, n=3, temperature=temperature, response_format=response_format
            )
            for is_stream in (False, True)
        ]
        assert free.result()["usage"]["completion_tokens"] == 200
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    for choice in answers[0]:
        check_schema(choice["content"], PERSON)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_json_object_is_one_and_wastes_nothing_on_blanks(letters: ServedModel, temperature: float) -> None:
    for seed in range(2):
        choices = choices_of(
            letters,
            is_stream=False,
            n=2,
            temperature=temperature,
            seed=seed,
            max_tokens=120,
            response_format={"type": "json_object"},
        )
        for choice in choices:
            assert choice["content"].startswith("{")
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["content"]), dict)
            without_strings = re.sub(r'"(?:[^"\\]|\\.)*"?', "", choice["content"])
            assert not re.search(r"\s\s|[\n\t]", without_strings)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_regex_choice_and_grammar_bind_chats_and_completions(
    letters: ServedModel, temperature: float
) -> None:
    for structured, pattern in (
        ({"regex": "[a-f]{2,5}/\\d{3}"}, "[a-f]{2,5}/[0-9]{3}"),
        ({"choice": ["yes", "no", "yes, but"]}, "yes|no|yes, but"),
        ({"grammar": 'start: "<" /[a-z]{1,3}/ ">"'}, "<[a-z]{1,3}>"),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
    ):
        for choice in choices_of(
            letters,
            is_stream=True,
            n=3,
            temperature=temperature,
            extra_body={"structured_outputs": structured},
        ):
            assert re.fullmatch(pattern, choice["content"]), (structured, choice)
            assert choice["finish_reason"] == "stop"
        answer = letters.complete("x", temperature=temperature, max_tokens=50, structured_outputs=structured)
        assert re.fullmatch(pattern, answer["choices"][0]["text"])


def test_a_cut_answer_says_so_and_ignore_eos_ends_where_the_grammar_does(letters: ServedModel) -> None:
    structured = {"regex": "[a-z]{30}"}
    cut = letters.complete("x", max_tokens=10, structured_outputs=structured)["choices"][0]
    assert re.fullmatch("[a-z]{10}", cut["text"]) and cut["finish_reason"] == "length"
    whole = letters.complete("x", max_tokens=50, ignore_eos=True, structured_outputs=structured)["choices"][0]
    assert re.fullmatch("[a-z]{30}", whole["text"]) and whole["finish_reason"] == "stop"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_required_gives_one_or_more_valid_calls(letters: ServedModel, temperature: float) -> None:
    both = [
        choices_of(
            letters, is_stream=is_stream, n=3, temperature=temperature, tools=TOOLS, tool_choice="required"
        )
        for is_stream in (False, True)
    ]
    assert both[0] == both[1]
    for choice in both[0]:
        check_calls(choice)
        assert 1 <= len(choice["calls"]) <= 16


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_named_function_is_called_once_and_no_other(letters: ServedModel, temperature: float) -> None:
    for name in ("get_weather", "get_weather_now"):
        named = {"type": "function", "function": {"name": name}}
        for is_stream in (False, True):
            for choice in choices_of(
                letters, is_stream=is_stream, n=3, temperature=temperature, tools=TOOLS, tool_choice=named
            ):
                check_calls(choice)
                assert [each for each, _ in choice["calls"]] == [name]


def test_one_call_alone_where_parallel_ones_are_not_wanted(letters: ServedModel) -> None:
    for choice in choices_of(
        letters,
        is_stream=False,
        n=8,
        temperature=2,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    ):
        check_calls(choice)
        assert len(choice["calls"]) == 1


def check_calls(choice: dict[str, Any]) -> None:
    assert choice["content"] == ""
    assert choice["finish_reason"] == "tool_calls"
    for name, arguments in choice["calls"]:
        if name == "get_weather":
            check_schema(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
        else:
            assert (name, json.loads(arguments)) == ("get_weather_now", {})


def test_a_schema_that_takes_for_ever_is_refused_in_time_and_others_are_served_meanwhile(
    letters: ServedModel,
) -> None:
    endless = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7919, 7907)]}
    body = {"prompt": "x", "structured_outputs": {"json": endless}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(letters.http.post, "/v1/completions", json=body)
        while not refused.done():
            began = time.monotonic()
            letters.text("free", max_tokens=2)
            assert time.monotonic() - began < 3
        assert refused.result().status_code == 400, refused.result().text
        assert "seconds" in refused.result().json()["error"]["message"]
    assert letters.text("x", max_tokens=9, structured_outputs={"choice": ["yes"]}) == "yes"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"foo": "bar"}, "required": ["foo"]},
        {"not": {}},
        {"type": "string", "pattern": "("},
        {"$ref": "#"},
    ],
)
def test_a_bad_schema_is_a_400_and_the_next_request_is_served(
    letters: ServedModel, schema: dict[str, Any]
) -> None:
    bad = letters.http.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"json": schema}})
    assert bad.status_code == 400
    assert letters.text("x", max_tokens=9, structured_outputs={"choice": ["yes"]}) == "yes"


def test_a_tool_loop_goes_round_and_its_turns_share_their_prefix(letters: ServedModel) -> None:
    create: Any = letters.openai.chat.completions.create
    messages: list[Any] = [
        {"role": "system", "content": "Be brief. " * 20},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    first = create(
        model=letters.model, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=300, seed=1
    )
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'} for call in message.tool_calls
    ]
    second = create(model=letters.model, messages=messages, tools=TOOLS, max_tokens=5)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    # All up to the model's own answer was computed before.
    assert second.usage.prompt_tokens_details.cached_tokens > 0.8 * first.usage.prompt_tokens
    third = create(model=letters.model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert third.usage.prompt_tokens == second.usage.prompt_tokens
