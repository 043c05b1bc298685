"""Tools over HTTP: what the template gets, what is refused, and how calls come out, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, World, events_of, serving
from support.recorded_outputs import RECORDED, SCHEMAS, Recorded
from support.text_doubles import EOS

from forkpoint.server.parsers.formats import CALL_FORMATS

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"does {name}", **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


TOOLS = [tool(name, {"type": "object", "properties": properties}) for name, properties in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving(FakeEngine(reply=says("x", EOS))) as shared:
        yield shared


def prompt_of(world: World, **body: Any) -> str:
    world.chat(**body)
    return bytes(world.engine.submits[-1].token_ids.tolist()).decode()


def streamed(world: World, **body: Any) -> list[dict[str, Any]]:
    with world.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True, **body}) as response:
        assert response.status_code == 200
        return events_of(response)


def whole_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream with one choice, and its finish_reason, after checking every delta."""
    message: dict[str, Any] = {"content": "", "calls": [], "reasoning": ""}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert set(call) == {"index", "id", "type", "function"}
                assert call["type"] == "function" and call["index"] == len(message["calls"])
                message["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            message["calls"][call["index"]][2] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("steps_per_turn", [1, 3, 1000])
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each.parser}-{each.text[:25]!r}")
def test_recorded_output_is_the_same_message_streamed_and_not(
    recorded: Recorded, steps_per_turn: int
) -> None:
    engine = FakeEngine(reply=says(recorded.text, EOS), steps_per_turn=steps_per_turn)
    with serving(engine, tool_call_parser=recorded.parser) as world:
        answer = world.chat(tools=TOOLS)["choices"][0]
        message = whole_message(streamed(world, tools=TOOLS))
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in answer["message"].get("tool_calls", [])
    ]
    assert calls == [(name, arguments) for _, name, arguments in message["calls"]]
    assert tuple((name, json.loads(arguments)) for name, arguments in calls) == recorded.calls
    assert len({call_id for call_id, _, _ in message["calls"]}) == len(recorded.calls)
    assert (answer["message"]["content"] or "") == message["content"] == recorded.content
    expected = "tool_calls" if recorded.calls else "stop"
    assert answer["finish_reason"] == message["finish_reason"] == expected
    # Absent or not empty; null only beside calls.
    assert ("tool_calls" in answer["message"]) == bool(recorded.calls)
    assert (answer["message"]["content"] is None) == (bool(recorded.calls) and recorded.content == "")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_call_that_is_cut_before_its_name_is_no_content(is_stream: bool) -> None:
    output = '{"name": "now", "arguments": {}}{"name": "no'
    with serving(FakeEngine(reply=says(output))) as world:
        body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(output)}
        if is_stream:
            message = whole_message(streamed(world, **body))
            content, calls = message["content"], message["calls"]
        else:
            whole = world.chat(**body)["choices"][0]["message"]
            content, calls = whole["content"] or "", whole["tool_calls"]
    assert content == ""
    assert len(calls) == 1


def test_a_call_that_the_length_cuts_stays_one_and_the_reason_is_length() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'
    with serving(FakeEngine(reply=says(text)), tool_call_parser="hermes") as world:
        body = {"tools": TOOLS, "max_tokens": len(text)}
        answer = world.chat(**body)["choices"][0]
        message = whole_message(streamed(world, **body))
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'
    assert message["calls"][0][2] == '{"city": "Pa'
    assert answer["finish_reason"] == message["finish_reason"] == "length"


def test_without_tools_or_with_none_what_looks_like_a_call_is_text() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with serving(FakeEngine(reply=says(text, EOS)), tool_call_parser="hermes") as world:
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}, {"tools": None}):
            choice = world.chat(**body)["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    with serving(FakeEngine(reply=says(text, EOS)), tool_call_parser="none") as world:
        assert world.chat(tools=TOOLS)["choices"][0]["message"]["content"] == text
        assert (
            world.refused(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"})["param"]
            == "tool_choice"
        )


def test_only_the_first_call_is_told_where_parallel_ones_are_not_wanted() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with serving(FakeEngine(reply=says(call * 3, EOS)), tool_call_parser="hermes") as world:
        for parallel, num_calls in ((False, 1), (True, 3)):
            answer = world.chat(tools=TOOLS, parallel_tool_calls=parallel)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == num_calls


def test_allowed_tools_leave_the_prompt_as_it_is_and_calls_of_others_are_text() -> None:
    other, allowed = (
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("search", "now")
    )
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    with serving(FakeEngine(reply=says(other + allowed, EOS)), tool_call_parser="hermes") as world:
        message = world.chat(tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
        free = world.chat(tools=TOOLS)["choices"][0]["message"]
        prompts = {bytes(submit.token_ids.tolist()) for submit in world.engine.submits}
    assert message["content"] == other
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert [call["function"]["name"] for call in free["tool_calls"]] == ["search", "now"]
    assert len(prompts) == 1


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_a_forced_choice_gives_the_engine_a_grammar_of_the_familys_form(parser: str) -> None:
    with serving(FakeEngine(reply=says("x", EOS)), tool_call_parser=parser) as world:
        for choice in ("required", NAMED):
            world.chat(tools=TOOLS, tool_choice=choice)
            grammar = world.engine.submits[-1].params.grammar
            assert grammar is not None and "now" in grammar
            # Llama's own template refuses a history with several calls in one message.
            is_single = choice == NAMED or CALL_FORMATS[parser].syntax.is_single
            assert is_single != ("{0,15}" in grammar)
            assert ("get_weather" in grammar) == (choice == "required")
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
        world.chat(tools=TOOLS, tool_choice=allowed)
        grammar = world.engine.submits[-1].params.grammar
        assert grammar is not None and "get_weather" not in grammar
        world.chat(tools=TOOLS, tool_choice="auto")
        assert world.engine.submits[-1].params.grammar is None


@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"type": "object"}},
        {"regex": "a/b|c"},
        {"choice": ["a", '"b"']},
        {"grammar": 'start: call\ncall: "a" calls\ncalls: "b"'},
        {"grammar": 'root ::= "a" | "b"'},
    ],
)
@pytest.mark.parametrize("tool_body", [{}, {"tools": TOOLS}])
def test_every_form_goes_with_reasoning_and_tools(
    structured: dict[str, Any], tool_body: dict[str, Any]
) -> None:
    engine = FakeEngine(reply=says("x", EOS))
    with serving(engine, reasoning_parser="think", tool_call_parser="hermes") as world:
        world.chat(structured_outputs=structured, **tool_body)
        grammar = world.engine.submits[-1].params.grammar
    assert grammar is not None and ("get_weather" in grammar) == bool(tool_body)


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_schemas_that_nobody_enforces_may_be_strange(parser: str) -> None:
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    with serving(FakeEngine(reply=says(text, EOS)), tool_call_parser=parser) as world:
        strange: list[Any] = [[], "x", {"a": "string"}, {"a": {"type": ["string", "null"]}}, None]
        for properties in strange:
            world.chat(tools=[tool("f", {"type": "object", "properties": properties})])


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_tools_and_a_response_format_allow_calls_or_the_form(parser: str) -> None:
    body = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    with serving(FakeEngine(reply=says('{"a": 1}', EOS)), tool_call_parser=parser) as world:
        assert world.chat(**body)["choices"][0]["message"]["content"] == '{"a": 1}'
        grammar = world.engine.submits[-1].params.grammar
        assert grammar is not None
        assert ("get_weather" in grammar) == (CALL_FORMATS[parser].marked_syntax is not None)
        for choice in ("required", NAMED):
            error = world.refused(CHAT, {"messages": HELLO, **body, "tool_choice": choice})
            assert error["param"] == "response_format"
        structured = {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}
        assert world.refused(CHAT, {"messages": HELLO, **structured})["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": []}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a" * 129)]}, "tools.0.function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name"),
        ({"tools": [tool("f", description=5)]}, "tools.0.function.description"),
        ({"tools": [tool("f", [])]}, "tools.0.function.parameters"),  # type: ignore[arg-type]
        ({"tools": [tool("f", {"type": "string"})]}, "tools.0.function.parameters.type"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("f", description="x" * 300_000)]}, "tools"),
        ({"tools": [tool("f", {"enum": list(range(30_000))})]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice.allowed_tools.tools",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_wrong_tools_are_refused_by_path(world: World, body: dict[str, Any], param: str) -> None:
    for is_stream in (False, True):
        error = world.refused(CHAT, {"messages": HELLO, "stream": is_stream, **body})
        assert error["param"] == param
    if param in ("functions", "function_call"):
        assert {"functions": "tools", "function_call": "tool_choice"}[param] in error["message"]


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_must_be(world: World) -> None:
    tools = [tool("f", {"type": "object", "not": {}})]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = world.refused(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice})
        assert "not" in error["message"]
    world.chat(tools=tools)


def test_a_template_without_tools_gets_them_in_a_system_text(world: World) -> None:
    plain = prompt_of(world, tools=[tool("f", {"type": "object", "properties": {"b": {}, "a": {}}})])
    assert plain.startswith("system:You can call these functions")
    # The client's order of keys, which models were trained on and the prefix cache wants the same.
    assert (
        '{"name":"f","description":"does f","parameters":{"type":"object","properties":{"b":{},"a":{}}}}'
        in plain
    )
    with_system = prompt_of(world, tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    assert with_system.startswith("system:Be brief.\n\nYou can call these functions")
    assert prompt_of(world, messages=HELLO) == "user:hi|assistant:"


def test_a_template_without_tools_gets_calls_and_results_as_text(world: World) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    prompt = prompt_of(
        world,
        messages=[
            *HELLO,
            {"role": "assistant", "content": "Wait.", "tool_calls": [call, {**call, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "tool", "tool_call_id": "c2", "name": "g", "content": [{"type": "text", "text": "43"}]},
            {"role": "user", "content": "And?"},
        ],
    )
    written = '{"name": "f", "arguments": {"a":"é"}}'
    assert prompt == (
        f"user:hi|assistant:Wait.\n{written}\n{written}"
        "|user:Result of f:\n42\n\nResult of g:\n43\n\nAnd?|assistant:"
    )


def test_tokenize_counts_the_tools_too(world: World) -> None:
    body = {"messages": HELLO, "tools": TOOLS}
    count = world.http.post("/tokenize", json={"model": MODEL, **body}).json()["count"]
    assert count == world.chat(**body)["usage"]["prompt_tokens"] > 100


def test_the_official_client_reads_calls_from_both_forms() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    with serving(FakeEngine(reply=says(text, EOS)), tool_call_parser="hermes") as world:
        create: Any = world.openai.chat.completions.create
        stream_of: Any = world.openai.chat.completions.stream
        answer = create(model=MODEL, messages=HELLO, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        with stream_of(model=MODEL, messages=HELLO, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_body_as_langchain_binds_tools_is_served() -> None:
    text = '{"name": "multiply", "arguments": {"a": 2, "b": 3}}'
    schema = {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "type": "object",
    }
    with serving(FakeEngine(reply=says(text, EOS))) as world:
        message = world.chat(
            model=MODEL,
            messages=[{"content": "What is 2 times 3?", "role": "user"}],
            stream=False,
            temperature=0.7,
            tools=[tool("multiply", schema)],
            parallel_tool_calls=False,
            tool_choice={"type": "function", "function": {"name": "multiply"}},
        )["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}


@pytest.mark.parametrize("steps_per_turn", [1, 1000])
def test_reasoning_is_split_off_and_counted(steps_per_turn: int) -> None:
    text = '<think>\nWhat time?\n</think>\n\nWell.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    engine = FakeEngine(reply=says(text, EOS), steps_per_turn=steps_per_turn)
    with serving(engine, tool_call_parser="hermes", reasoning_parser="think") as world:
        answer = world.chat(tools=TOOLS)
        message = whole_message(streamed(world, tools=TOOLS))
        plain = world.chat()["choices"][0]["message"]
    told = answer["choices"][0]["message"]
    assert told["reasoning_content"] == message["reasoning"] == "What time?"
    assert told["content"] == message["content"] == "Well."
    assert [call["function"]["name"] for call in told["tool_calls"]] == ["now"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] in range(
        len("\nWhat time?\n"), len(text) // 2
    )
    assert plain["reasoning_content"] == "What time?"
    assert plain["content"].startswith("Well.\n<tool_call>")


def test_a_grammar_lets_a_reasoning_model_think_first() -> None:
    with serving(
        FakeEngine(reply=says("x", EOS)), reasoning_parser="think", tool_call_parser="hermes"
    ) as world:
        for body in (
            {"tools": TOOLS, "tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
        ):
            world.chat(**body)
            grammar = world.engine.submits[-1].params.grammar
            assert grammar is not None and "</think>" in json.loads(grammar)["grammars"][0][
                "lark_grammar"
            ].replace("\\", "")
