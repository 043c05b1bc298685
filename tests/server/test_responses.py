"""/v1/responses: both ways of the official client, equal texts, and a refusal of all that needs state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, World, error_of, serving
from support.text_doubles import EOS


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One server for all requests that never reach its engine."""
    with serving() as world:
        yield world


def prompts(world: World) -> list[str]:
    return [
        bytes(int(token) for token in submit.token_ids if token < 256).decode()
        for submit in world.engine.submits
    ]


def test_a_string_is_answered_with_one_message() -> None:
    with serving(FakeEngine(reply=says("Grüße", EOS), cached_tokens=3)) as world:
        response = world.openai.responses.create(
            model=MODEL,
            input="hi",
            instructions="be kind",
            max_output_tokens=50,
            temperature=0,
            metadata={"a": "b"},
        )
        assert response.output_text == "Grüße"
        assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
        assert response.id.startswith("resp_")
        assert (response.instructions, response.max_output_tokens, response.temperature) == ("be kind", 50, 0)
        assert response.metadata == {"a": "b"}
        assert response.store is False and response.previous_response_id is None  # type: ignore[attr-defined]
        assert prompts(world) == ["system:be kind|user:hi|assistant:"]
        usage = response.usage
        assert usage is not None
        num_prompt_tokens = len(world.engine.submits[0].token_ids)
        assert (usage.input_tokens, usage.output_tokens) == (num_prompt_tokens, 8)  # bytes, and the end token
        assert usage.total_tokens == usage.input_tokens + 8
        assert usage.input_tokens_details.cached_tokens == 3


def test_a_conversation_goes_on_with_what_the_last_response_gave() -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        first = world.openai.responses.create(model=MODEL, input="one")
        conversation: list[Any] = [
            {"role": "developer", "content": "sys"},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
            *[item.model_dump() for item in first.output],
            {"type": "message", "role": "user", "content": "two"},
        ]
        second = world.openai.responses.create(model=MODEL, input=conversation, instructions="first")
        assert second.output_text == "ok"
        assert prompts(world)[1] == "system:first\n\nsys|user:one|assistant:ok|user:two|assistant:"
        assert first.id != second.id


def test_the_stream_has_every_event_once_in_order_and_the_same_text() -> None:
    text = "Grüße an alle"
    with serving(FakeEngine(reply=says(text, EOS))) as world:
        with world.openai.responses.stream(model=MODEL, input="hi") as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = world.openai.responses.create(model=MODEL, input="hi")
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == whole.output_text == text
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens == len(text.encode()) + 1
    identities = {event.item_id for event in events if event.type == "response.output_text.delta"}
    assert identities == {getattr(final.output[0], "id", None)}


def test_events_are_named_on_the_wire_and_say_nothing_of_chat() -> None:
    with serving(FakeEngine(reply=says("a", EOS))) as world:
        response = world.http.post("/v1/responses", json={"input": "hi", "stream": True})
        frames = response.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '","sequence_number":')
        assert '"usage":null}' not in data or '"response":' in data
    assert frames[0].startswith("event: response.created\n")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(is_stream: bool) -> None:
    with serving(FakeEngine(reply=says("abcdef"))) as world:
        if is_stream:
            with world.openai.responses.stream(model=MODEL, input="hi", max_output_tokens=3) as stream:
                response: Any = [event for event in stream][-1]
            assert response.type == "response.incomplete"
            response = response.response
        else:
            response = world.openai.responses.create(model=MODEL, input="hi", max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "abc"
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "text.format.schema"),
        ({"text": "x"}, "text"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input.0.content"),
        ({"input": [{"type": "reasoning"}, {"role": "robot", "content": "x"}]}, "input.1.role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"instructions": ["x"]}, "instructions"),
        ({"metadata": 3}, "metadata"),
        ({"reasoning": "high"}, "reasoning"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.type"),
        ({"input": [{"type": None}]}, "input.0.type"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_not_built_or_wrong_is_a_400_that_names_it(
    extra: dict[str, Any], param: str, is_stream: bool, shared: World
) -> None:
    error = shared.refused("/v1/responses", {"input": "hi", "stream": is_stream, **extra})
    assert error["param"] == param
    assert "messages" not in error["message"].split(" ")[0]
    assert shared.engine.submits == []


def test_what_asks_for_nothing_is_taken() -> None:
    neutral: dict[str, Any] = {
        "previous_response_id": None, "store": False, "background": False, "tools": [], "tool_choice": "auto",
        "truncation": "disabled", "include": ["reasoning.encrypted_content"], "top_logprobs": 0, "user": "me",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low"},
        "unheard_of": 1,
        "service_tier": "auto", "stream_options": {"include_obfuscation": False},
        "parallel_tool_calls": False,
    }  # fmt: skip
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        response = world.http.post("/v1/responses", json={"input": "hi", **neutral})
        assert response.status_code == 200, response.text
        assert world.template is not None
        assert {"reasoning_effort": "low"} in [kwargs for _, kwargs in world.template.calls]


THINKING = "<think>hm, hm</think>yes"


def test_reasoning_is_an_item_of_its_own_before_the_message() -> None:
    with serving(FakeEngine(reply=says(THINKING, EOS)), reasoning_parser="think") as world:
        whole = world.openai.responses.create(model=MODEL, input="hi")
        with world.openai.responses.stream(model=MODEL, input="hi") as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.type for item in whole.output] == [item.type for item in final.output]
        for response in (whole, final):
            reasoning, message = (item.to_dict() for item in response.output)
            assert reasoning["type"] == "reasoning"
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, hm"}]
            assert message["type"] == "message"
            assert response.output_text == "yes"
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens > 0
        deltas = {
            (event.type, getattr(event, "output_index", None)) for event in events if hasattr(event, "delta")
        }
        assert deltas == {("response.reasoning_text.delta", 0), ("response.output_text.delta", 1)}
        assert [event.sequence_number for event in events] == list(range(len(events)))
        # What it thought may be sent back: the template gets it with the message that it led to.
        conversation: list[Any] = [
            *[item.model_dump() for item in whole.output],
            {"role": "user", "content": "?"},
        ]
        world.openai.responses.create(model=MODEL, input=conversation)
        assert prompts(world)[-1] == "assistant:yes|user:?|assistant:"
        assert world.template is not None
        given = [message for messages, _ in world.template.calls for message in messages]
        assert {"role": "assistant", "content": "yes", "reasoning_content": "hm, hm"} in given


def test_an_answer_that_ends_while_it_thinks_still_has_a_message() -> None:
    with serving(FakeEngine(reply=says(THINKING)), reasoning_parser="think") as world:
        response = world.openai.responses.create(model=MODEL, input="hi", max_output_tokens=10)
        assert [(item.type, item.to_dict()["status"]) for item in response.output] == [
            ("reasoning", "completed"),
            ("message", "incomplete"),
        ]
        assert response.output_text == ""


def test_a_form_of_the_text_becomes_a_grammar() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    with serving(FakeEngine(reply=says('{"a":1}', EOS))) as world:
        response = world.openai.responses.create(model=MODEL, input="hi", text=text)
        assert response.output_text == '{"a":1}'
        world.openai.responses.create(model=MODEL, input="hi")
        grammars = [submit.params.grammar for submit in world.engine.submits]
        assert grammars[0] is not None and '"a"' in grammars[0]
        assert grammars[1] is None


def test_other_models_keys_and_states_are_refused_as_everywhere() -> None:
    with serving(api_keys=("secret",)) as world:
        error_of(world.http.post("/v1/responses", json={"input": "hi"}), 401)
        with pytest.raises(openai.NotFoundError) as caught:
            world.openai.responses.create(model="other", input="hi")
        assert caught.value.code == "model_not_found"
    with serving(has_template=False) as world:
        assert "--chat-template" in world.refused("/v1/responses", {"input": "hi"})["message"]
    with serving() as world:
        error_of(world.http.get("/v1/responses/resp_1"), 404)


def test_a_stream_that_fails_ends_with_the_envelope() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        stream = None
        with pytest.raises(openai.APIError, match="out of luck"):

            def fail() -> None:
                world.engine.until(lambda: world.engine.num_waiting == 1)
                world.engine.step()
                world.engine.fail_sequence(world.engine.submits[-1].uid, "out of luck")

            failing = threading.Thread(target=fail)
            failing.start()
            stream = world.openai.responses.create(model=MODEL, input="hi", stream=True)
            for _ in stream:
                pass
        failing.join()
