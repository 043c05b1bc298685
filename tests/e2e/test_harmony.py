"""A random gpt-oss that answers in channels: forced outputs are valid at any temperature, no marker shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from support.harmony import CALL, END, save_tiny_gpt_oss
from support.served import ServedModel, serve_ready

from forkpoint.server.parsers.harmony import MARKERS

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPERATURES = (0.0, 1.0)
# A random model would think to the end of the context; so it ends at once where it is greedy, else soon.
STOPS_THINKING = {0.0: {str(END): 20.0}, 1.0: {str(END): 3.5}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    model_dir = save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "gpt-oss")
    with serve_ready(model_dir, "--page-size", "4", "--max-total-tokens", "40000") as served:
        yield served


def choices_of(served: ServedModel, *, is_stream: bool, **body: Any) -> list[dict[str, Any]]:
    """Per choice reasoning, content, calls and finish_reason, put together from a stream or not."""
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": 400,
        "seed": 7,
        "n": 3,
        **body,
    }
    body["logit_bias"] = STOPS_THINKING[body["temperature"]]
    create = served.openai.chat.completions.create
    if not is_stream:
        answer = create(model=served.model, **body)
        return [
            {
                "reasoning": getattr(choice.message, "reasoning_content", None) or "",
                "content": choice.message.content or "",
                "calls": [
                    (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
                ],
                "finish_reason": choice.finish_reason,
            }
            for choice in answer.choices
        ]
    parts: dict[int, dict[str, Any]] = {}
    for chunk in create(model=served.model, stream=True, **body):
        for choice in chunk.choices:
            part = parts.setdefault(
                choice.index, {"reasoning": "", "content": "", "calls": [], "finish_reason": None}
            )
            part["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            part["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name is not None:
                    part["calls"].append((call.function.name, ""))
                name, arguments = part["calls"][call.index]
                part["calls"][call.index] = (name, arguments + call.function.arguments)
            part["finish_reason"] = choice.finish_reason or part["finish_reason"]
    return [parts[index] for index in sorted(parts)]


def both_ways(served: ServedModel, **body: Any) -> list[dict[str, Any]]:
    """The choices, after checking that a stream gives the same, and that no marker is in them."""
    whole = choices_of(served, is_stream=False, **body)
    assert choices_of(served, is_stream=True, **body) == whole
    assert not any(marker in json.dumps(whole) for marker in MARKERS)
    return whole


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_schema_binds_the_final_message_and_not_the_reasoning(
    served: ServedModel, temperature: float
) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    choices = both_ways(served, temperature=temperature, response_format=response_format)
    for choice in choices:
        jsonschema_rs.validator_for(CITY).validate(json.loads(choice["content"]))
        assert (choice["calls"], choice["finish_reason"]) == ([], "stop")
    if temperature:
        assert any(choice["reasoning"] for choice in choices)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("choice", ["required", "get_weather", "now"])
def test_a_forced_call_is_valid(served: ServedModel, temperature: float, choice: str) -> None:
    forced = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    for told in both_ways(served, temperature=temperature, tools=TOOLS, tool_choice=forced):
        assert (told["content"], told["finish_reason"]) == ("", "tool_calls")
        ((name, arguments),) = told["calls"]
        assert choice in ("required", name)
        if name == "now":
            assert json.loads(arguments) == {}
        else:
            jsonschema_rs.validator_for(CITY).validate(json.loads(arguments))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_with_tools_and_a_form_each_choice_is_one_or_the_other(
    served: ServedModel, temperature: float
) -> None:
    for told in both_ways(
        served, temperature=temperature, tools=TOOLS, extra_body={"structured_outputs": {"regex": "[a-f]{3}"}}
    ):
        if told["calls"]:
            assert (told["content"], told["finish_reason"]) == ("", "tool_calls")
        else:
            assert re.fullmatch("[a-f]{3}", told["content"]) and told["finish_reason"] == "stop"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_free_output_shows_no_marker(served: ServedModel, temperature: float) -> None:
    both_ways(served, temperature=temperature, max_tokens=60)
    both_ways(served, temperature=temperature, max_tokens=60, tools=TOOLS)


def test_the_end_of_a_call_ends_the_answer(served: ServedModel) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0,
    }
    answer = served.openai.chat.completions.create(model=served.model, logit_bias={str(CALL): 100}, **body)
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")


def test_an_answer_is_continued_in_its_own_message(served: ServedModel) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "My answer is "}]
    body = {"continue_final_message": True, "structured_outputs": {"regex": "[a-f]{3}"}}
    for told in both_ways(served, messages=messages, temperature=1, extra_body=body):
        assert re.fullmatch("[a-f]{3}", told["content"]) and not told["reasoning"]


def test_the_turns_of_a_tool_loop_share_their_prefix(served: ServedModel) -> None:
    create: Any = served.openai.chat.completions.create
    messages: list[Any] = [
        {"role": "system", "content": "Be brief. " * 20},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    forced: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "logit_bias": STOPS_THINKING[1.0],
        "seed": 3,
    }
    first = create(model=served.model, messages=messages, max_tokens=300, temperature=1, **forced)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"})
    second = create(model=served.model, messages=messages, max_tokens=5, **{**forced, "tool_choice": "auto"})
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0.8 * first.usage.prompt_tokens
