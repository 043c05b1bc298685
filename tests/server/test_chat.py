"""/v1/chat/completions: what the template gets, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, World, serving
from support.text_doubles import EOS

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    with serving() as world:
        yield world


def test_official_client_gets_a_chat_completion() -> None:
    with serving(FakeEngine(reply=says("Hello!", EOS))) as world:
        answer = world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user:hi|assistant:")
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_is_the_room_in_context_and_pool_by_default() -> None:
    with serving(FakeEngine(reply=says("x", EOS))) as world:
        answer = world.chat()
        num_prompt = answer["usage"]["prompt_tokens"]
        assert world.engine.submits[0].params.max_tokens == 2048 - num_prompt


def test_n_gives_n_choices_and_counts_the_prompt_once() -> None:
    with serving() as world:
        answer = world.chat(n=3, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len("user:hi|assistant:")


def test_one_text_part_is_the_same_as_a_string_and_several_all_arrive_in_order() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with serving() as world:
        world.chat(messages=[{"role": "user", "content": parts[:1]}], max_tokens=1)
        world.chat(messages=[{"role": "user", "content": "one"}], max_tokens=1)
        world.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
        texts = [bytes(submit.token_ids.tolist()).decode() for submit in world.engine.submits]
    assert texts == ["user:one|assistant:", "user:one|assistant:", "user:one\ntwo|assistant:"]


def test_developer_is_system() -> None:
    with serving() as world:
        world.chat(messages=[{"role": "developer", "content": "be brief"}], max_tokens=1)
        assert bytes(world.engine.submits[0].token_ids.tolist()).startswith(b"system:be brief|")


def test_tool_history_reaches_the_template_with_parsed_arguments() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    with serving(template_knows_tools=True) as world:
        world.chat(
            messages=[
                {"role": "user", "content": "hi", "name": "ann", "unknown": 1},
                {"role": "assistant", "content": None, "tool_calls": [call, broken]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ],
            max_tokens=1,
        )
        assert world.template is not None
        messages = world.template.calls[0][0]
    assert messages[0] == {"role": "user", "content": "hi", "name": "ann"}
    assert [each["function"]["arguments"] for each in messages[1]["tool_calls"]] == [{"a": 1}, "{broken"]
    assert messages[2] == {"role": "tool", "content": "42", "tool_call_id": "c1"}


def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    with serving() as world:
        world.chat(messages=[{"role": "user", "content": "hi"}, refusal], max_tokens=1)
        prompt = bytes(world.engine.submits[0].token_ids.tolist()).decode()
    assert prompt == "user:hi|assistant:No.|assistant:"


def test_template_fields_reach_the_template() -> None:
    with serving() as world:
        last = {"role": "assistant", "content": "So"}
        world.chat(messages=[last], continue_final_message=True, max_tokens=1)
        world.chat(messages=[last], add_generation_prompt=False, max_tokens=1)
        assert world.template is not None
        world.template.calls.clear()
        world.chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", max_tokens=1)
        texts = [bytes(submit.token_ids.tolist()).decode() for submit in world.engine.submits]
        # What looks for anchors renders with the same options.
        kwargs = [given for _, given in world.template.calls]
        assert kwargs == [{"enable_thinking": False, "reasoning_effort": "low"}] * len(kwargs)
        assert len(kwargs) > 1
    assert texts[:2] == ["assistant:So", "assistant:So|"]


def test_model_without_template_says_which_flag_helps() -> None:
    with serving(has_template=False) as world:
        error = world.refused(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert "--chat-template" in error["message"]
        world.complete(max_tokens=1)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages.0"),
        ([None], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "root", "content": "hi"}], "messages.0.role"),
        ([{"role": ["user"], "content": "hi"}], "messages.0.role"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "system", "content": 5}], "messages.0.content"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "video", "text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "tool", "content": "42"}], "messages.0.tool_call_id"),
        ([{"role": "tool", "content": "42", "tool_call_id": ""}], "messages.0.tool_call_id"),
        ([{"role": "user", "content": "x", "name": 3}], "messages.0.name"),
        ([{"role": "assistant", "tool_calls": {}}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages.0.tool_calls.0"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages.0.tool_calls.0.function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0.function.name"),
    ],
)
def test_wrong_messages_are_refused_with_the_path_of_the_fault(
    shared_world: World, messages: Any, param: str
) -> None:
    assert shared_world.refused(CHAT, {"messages": messages})["param"] == param
    assert shared_world.engine.submits == []


def test_image_part_is_refused_by_its_type() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with serving() as world:
        error = world.refused(CHAT, {"messages": [{"role": "user", "content": [image]}]})
        assert "image_url" in error["message"] and "AAAA" not in error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"chat_template_kwargs": []},
        {"add_generation_prompt": "yes"},
        {"chat_template": "{{ messages }}"},
        {"reasoning_effort": 3},
    ],
)
def test_wrong_template_fields_are_refused(shared_world: World, extra: dict[str, Any]) -> None:
    shared_world.refused(CHAT, {"messages": [{"role": "user", "content": "hi"}], **extra})


def test_refusal_of_the_template_is_a_400() -> None:
    with serving() as world:
        error = world.refused(CHAT, {"messages": [{"role": "user", "content": "refuse me"}]})
        assert error["param"] == "messages"


def test_special_token_that_the_model_does_not_have_is_refused() -> None:
    with serving() as world:
        error = world.refused("/v1/completions", {"prompt": "<image>"})
        assert "300" in error["message"]
        assert world.engine.submits == []
