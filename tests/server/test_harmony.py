"""gpt-oss over HTTP: its channels streamed and whole, and chats as its template reads them."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, says
from support.grammar_checks import accepts
from support.harmony import harmony_template
from support.http_server import World, events_of, serving
from support.text_doubles import EOS

from forkpoint.configs.errors import ConfigError
from forkpoint.server.message_pieces import ContentPiece, MessagePiece, ReasoningPiece, joined
from forkpoint.server.parsers.harmony import ANALYSIS_OPENING as ANALYSIS
from forkpoint.server.parsers.harmony import FINAL_OPENING as FINAL
from forkpoint.server.parsers.harmony import MARKERS
from forkpoint.server.rendering import Rendering
from forkpoint.server.structured import Structure
from forkpoint.server.structured_rules import OutputRule
from forkpoint.server.tools import read_tools
from forkpoint.server.tools_dialect import Dialect

CHAT = "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
HARMONY: dict[str, Any] = {"tool_call_parser": "harmony", "reasoning_parser": "harmony"}
QUESTION = {"role": "user", "content": "Weather?"}
_NEXT = "<|end|><|start|>assistant"
CALLS = (
    f"<|channel|>analysis<|message|>Look it up.{_NEXT}<|channel|>commentary<|message|>One moment.{_NEXT}"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)
ANSWER = f"<|channel|>analysis<|message|>Easy.{_NEXT}<|channel|>final<|message|>It is sunny."


def streamed(world: World, **body: Any) -> tuple[dict[str, Any], str | None]:
    """The message that the deltas of a stream make, and its finish_reason."""
    message: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    finish_reason = None
    with world.http.stream("POST", CHAT, json={"messages": [QUESTION], "stream": True, **body}) as response:
        events = events_of(response)
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["reasoning"] += delta.get("reasoning_content", "")
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if "name" in call["function"]:
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            finish_reason = choice["finish_reason"] or finish_reason
    return message, finish_reason


def whole(world: World, **body: Any) -> tuple[dict[str, Any], str | None]:
    choice = world.chat(messages=[QUESTION], **body)["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    return {
        "reasoning": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
    }, choice["finish_reason"]


@pytest.mark.parametrize(
    ("output", "body", "message", "finish_reason"),
    [
        (
            CALLS,
            {"tools": [WEATHER, NOW]},
            {
                "reasoning": "Look it up.",
                "content": "One moment.",
                "calls": [["get_weather", '{"city": "Paris"}'], ["now", "{}"]],
            },
            "tool_calls",
        ),
        (
            CALLS,
            {"tools": [WEATHER, NOW], "parallel_tool_calls": False},
            {
                "reasoning": "Look it up.",
                "content": "One moment.",
                "calls": [["get_weather", '{"city": "Paris"}']],
            },
            "tool_calls",
        ),
        (ANSWER, {}, {"reasoning": "Easy.", "content": "It is sunny.", "calls": []}, "stop"),
        (ANSWER, {"tools": [NOW]}, {"reasoning": "Easy.", "content": "It is sunny.", "calls": []}, "stop"),
        # No tools, or none that may be called: nothing of the message is lost, and there is no call.
        (
            CALLS,
            {},
            {"reasoning": "Look it up.", "content": 'One moment.\n{"city": "Paris"}\n{}', "calls": []},
            "stop",
        ),
        (
            CALLS,
            {"tools": [WEATHER, NOW], "tool_choice": "none"},
            {"reasoning": "Look it up.", "content": 'One moment.\n{"city": "Paris"}\n{}', "calls": []},
            "stop",
        ),
    ],
)  # fmt: skip
def test_channels_are_told_streamed_as_whole(
    output: str, body: dict[str, Any], message: dict[str, Any], finish_reason: str
) -> None:
    with serving(FakeEngine(reply=says(output, EOS)), **HARMONY) as world:
        assert whole(world, **body) == (message, finish_reason)
        assert streamed(world, **body) == (message, finish_reason)


@pytest.mark.parametrize("num_tokens", [*range(1, len(CALLS), 7)])
def test_an_output_that_is_cut_anywhere_shows_no_marker(num_tokens: int) -> None:
    with serving(FakeEngine(reply=says(CALLS, EOS)), **HARMONY) as world:
        body = {"tools": [WEATHER, NOW], "max_tokens": num_tokens}
        message, finish_reason = whole(world, **body)
        assert streamed(world, **body) == (message, finish_reason)
        assert finish_reason == "length"
        for call in message["calls"]:
            assert call[0] in ("get_weather", "now")
        # In a text of bytes a marker may be cut, which a token cannot.
        assert not any(marker in str(message) for marker in MARKERS)


def test_reasoning_is_counted() -> None:
    with serving(FakeEngine(reply=says(ANSWER, EOS)), **HARMONY) as world:
        usage = world.chat(messages=[QUESTION])["usage"]
    # A byte each: the last one of the marker before, the text, all but the last of the marker behind it.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 1 + 5 + len("<|end|>") - 1


def dialect(**names: str) -> Dialect:
    return Dialect.of(harmony_template(), **{"tool_call_parser": "auto", "reasoning_parser": "auto", **names})


def rendered(messages: list[dict[str, Any]], **body: Any) -> str:
    prepared, rendering = dialect().prepared(messages, Rendering(), read_tools(body))
    return rendering.text(harmony_template(), prepared)


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_the_template_tells_the_format_and_that_it_knows_tools() -> None:
    found = dialect()
    assert found.channels is not None and found.call_format is found.channels is found.reasoning
    assert found.template_knows_tools


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_the_history_reaches_the_template_and_stays_until_an_answer(name: str) -> None:
    asked: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        name: "Look it up.",
        "tool_calls": [call("a", "now")],
    }
    before: list[dict[str, Any]] = [QUESTION, asked, result("a", "noon")]
    thought = "<|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|>"
    assert thought in rendered(before)
    assert thought not in rendered([*before, {"role": "assistant", "content": "Noon."}, QUESTION])
    assert "thinking" not in asked


def test_content_beside_reasoning_and_a_call_goes_behind_the_reasoning() -> None:
    asked = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call("a", "now")]}
    for content in ("One moment.", [{"type": "text", "text": "One"}, {"type": "text", "text": "moment."}]):
        text = rendered([QUESTION, {**asked, "content": content}, result("a", "noon")])
        assert "<|message|>Hm.\nOne" in text and "moment.<|end|>" in text


def test_every_call_of_a_message_stands_before_its_own_result() -> None:
    asked: dict[str, Any] = {"role": "assistant", "reasoning_content": "Both.", "content": None}
    asked["tool_calls"] = [call("a", "now"), call("b", "get_weather", city="Rome")]
    text = rendered([QUESTION, asked, result("b", "sun"), result("a", "noon"), result("x", "lost"), QUESTION])
    parts = [
        "<|message|>Both.<|end|>",
        "to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>',
        'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sun"<|end|>',
        '"lost"',
        "<|start|>user",
    ]
    places = [text.rindex(part) for part in parts]
    assert places == sorted(places)
    assert text.count("Both.") == 1


def test_tools_without_a_description_reach_the_template() -> None:
    text = rendered([QUESTION], tools=[WEATHER, NOW])
    assert "// \ntype get_weather" in text and "// The time\ntype now" in text


@pytest.mark.parametrize(
    ("prompt_end", "continued", "output", "pieces"),
    [
        (
            "<|end|><|start|>assistant",
            "",
            f"{ANALYSIS}a{_NEXT}{FINAL}b",
            (ReasoningPiece("a"), ContentPiece("b")),
        ),
        (f"<|start|>assistant{ANALYSIS}", "", f"a{_NEXT}{FINAL}b", (ReasoningPiece("a"), ContentPiece("b"))),
        (f"<|start|>assistant{ANALYSIS}a", "", f"b{_NEXT}{FINAL}c", (ReasoningPiece("b"), ContentPiece("c"))),
        (f"<|start|>assistant{FINAL}", "", "a", (ContentPiece("a"),)),
        ("long before", "long before", " to=functions.now", (ContentPiece(" to=functions.now"),)),
        (f"<|start|>assistant{ANALYSIS}a<|end|>", "", f"<|start|>assistant{FINAL}b", (ContentPiece("b"),)),
    ],
)
def test_a_message_that_the_prompt_began_is_read_on(
    prompt_end: str, continued: str, output: str, pieces: tuple[MessagePiece, ...]
) -> None:
    plan = dialect().plan(None, None, lambda marker: None, prompt_end=prompt_end, continued=continued)
    assert plan.new_parser is not None
    parser = plan.new_parser()
    assert joined([*parser.push(output), *parser.finish()]) == pieces
    assert plan.shown_special_tokens == set(MARKERS)


@pytest.mark.parametrize(
    ("prompt_end", "allowed", "refused"),
    [
        (
            "<|start|>assistant",
            (f"{FINAL}ab", f"{ANALYSIS}why<|end|><|start|>assistant{FINAL}ab"),
            ("ab", ANALYSIS),
        ),
        (f"<|start|>assistant{ANALYSIS}", (f"why<|end|><|start|>assistant{FINAL}ab",), (f"{FINAL}ab", "ab")),
        (f"<|start|>assistant{FINAL}", ("ab",), (f"{FINAL}ab",)),
    ],
)
def test_a_form_binds_the_final_message_wherever_the_prompt_ends(
    prompt_end: str, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    structure = Structure(OutputRule('"ab"'), "structured_outputs.regex")
    plan = dialect().plan(None, structure, lambda marker: None, prompt_end=prompt_end)
    assert plan.rule is not None
    grammar = plan.rule.text
    assert all(accepts(grammar, text) for text in allowed)
    assert not any(accepts(grammar, text) for text in refused)


def test_one_of_the_two_parsers_can_be_off_and_neither_can_be_another() -> None:
    assert dialect(tool_call_parser="none").reasoning is not None
    assert dialect(reasoning_parser="none").reasoning is None
    for names in ({"tool_call_parser": "hermes"}, {"reasoning_parser": "think"}):
        with pytest.raises(ConfigError, match="harmony"):
            dialect(**names)


def test_calls_stay_content_and_reasoning_too_where_they_are_not_looked_for() -> None:
    output = FakeEngine(reply=says(CALLS, EOS))
    with serving(output, tool_call_parser="none", reasoning_parser="harmony") as world:
        message, _ = whole(world, tools=[WEATHER, NOW])
        assert message["reasoning"] == "Look it up." and message["calls"] == []
        assert world.refused(CHAT, {"messages": [QUESTION], "tools": [NOW], "tool_choice": "required"})
    with serving(output, tool_call_parser="harmony", reasoning_parser="none") as world:
        message, _ = whole(world, tools=[WEATHER, NOW])
        assert message["content"] == "Look it up.\nOne moment." and len(message["calls"]) == 2
