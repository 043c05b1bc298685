"""What is found out of a chat template: its formats, and whether it knows tools and a system text."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.chat_templates import GEMMA, TEMPLATES
from support.text_doubles import TagTemplate

from forkpoint.configs.settings import ReasoningParser, ToolCallParser
from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.message_pieces import ContentPiece, ReasoningPiece, joined
from forkpoint.server.parsers.formats import CALL_FORMATS, detect_call_format, detect_reasoning
from forkpoint.server.rendering import Rendering
from forkpoint.server.tools import Tools, read_tools
from forkpoint.server.tools_dialect import Dialect

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<bos>"})


def dialect_of(source: str, **names: str) -> Dialect:
    return Dialect.of(
        template_of(source), **{"tool_call_parser": "auto", "reasoning_parser": "auto", **names}
    )


def tools_of(**body: Any) -> Tools:
    tools = read_tools({"tools": [TOOL], **body})
    assert tools is not None
    return tools


@pytest.mark.parametrize(
    ("name", "call_format", "knows_tools", "knows_system"),
    [
        ("gemma", "gemma", False, True),
        ("chatml", "hermes", True, True),
        ("llama3", "llama3_json", True, True),
        ("strict", "json", True, True),
        ("reasoning", "json", False, True),
    ],
)
def test_the_template_tells_what_a_model_knows(
    name: str, call_format: str, knows_tools: bool, knows_system: bool
) -> None:
    dialect = dialect_of(TEMPLATES[name])
    assert detect_call_format(TEMPLATES[name]) == call_format
    assert dialect.call_format is CALL_FORMATS[call_format]
    assert dialect.template_knows_tools is knows_tools
    assert dialect.template_knows_system is knows_system
    assert (dialect.reasoning is not None) is (name == "reasoning")


@pytest.mark.parametrize(
    ("sign", "call_format"),
    [
        ("{{ '<start_function_call>call:' }}<start_of_turn>", "functiongemma"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11"),
        ("[TOOL_CALLS] [{}]", "mistral"),
        ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("<|start_header_id|><|python_tag|>", "llama3_json"),
        ("", "json"),
    ],
)
def test_the_most_telling_sign_decides(sign: str, call_format: str) -> None:
    assert detect_call_format(sign) == call_format


def test_reasoning_is_known_by_its_tags() -> None:
    assert detect_reasoning("[THINK]") == "mistral"
    assert detect_reasoning("split('</think>')") == "think"
    assert detect_reasoning("<|im_start|>") is None


def test_named_parsers_win_over_the_template() -> None:
    dialect = dialect_of(TEMPLATES["chatml"], tool_call_parser="json", reasoning_parser="deepseek_r1")
    assert dialect.call_format is CALL_FORMATS["json"] and dialect.reasoning is not None
    dialect = dialect_of(TEMPLATES["reasoning"], tool_call_parser="none", reasoning_parser="none")
    assert dialect.call_format is None and dialect.reasoning is None


def test_the_settings_name_every_format_and_no_other() -> None:
    assert {"auto", "none", *CALL_FORMATS} == set(get_args(ToolCallParser))
    for name in set(get_args(ReasoningParser)) - {"auto", "none"}:
        assert dialect_of(TEMPLATES["reasoning"], reasoning_parser=name).reasoning is not None


def test_a_template_that_knows_tools_gets_them_as_the_client_wrote_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    dialect = dialect_of(TEMPLATES["chatml"])
    prepared, rendering = dialect.prepared(messages, Rendering(), tools_of())
    assert prepared == messages
    assert rendering.tools == (TOOL,)
    # With tool_choice none too: the prompt, and so the cached prefix, stays the same.
    assert dialect.prepared(messages, Rendering(), tools_of(tool_choice="none"))[1].tools == (TOOL,)


def test_gemma_gets_tools_before_the_first_question_and_turns_that_alternate() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    prepared, rendering = dialect_of(GEMMA).prepared(messages, Rendering(), tools_of())
    text = rendering.text(template_of(GEMMA), prepared)
    assert text.index('{"name":"f"') < text.index("hi<end_of_turn>")
    assert '<start_of_turn>model\n{"name": "f", "arguments": {"a":1}}<end_of_turn>' in text
    assert "<start_of_turn>user\nResult of f:\n42<end_of_turn>" in text


def test_without_a_place_for_a_system_text_the_first_question_carries_the_tools() -> None:
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}|{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "hi"}]
    prepared, rendering = dialect_of(no_system).prepared(messages, Rendering(), tools_of())
    text = rendering.text(template_of(no_system), prepared)
    assert text.startswith("assistant:Yes?|user:You can call these functions")
    assert text.endswith("\n\nhi|")


def test_system_text_in_parts_keeps_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
    dialect = Dialect.of(TagTemplate(), tool_call_parser="auto", reasoning_parser="auto")
    prepared, _ = dialect.prepared(messages, Rendering(), tools_of())
    assert [part["text"] for part in prepared[0]["content"]][:2] == ["one", "two"]
    assert "You can call" in prepared[0]["content"][2]["text"]
    assert parts == messages[0]["content"]


@pytest.mark.parametrize(
    ("prompt_end", "continued", "is_open"),
    [
        ("<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<think>\n\n</think>\n\n", "", False),
        ("<think>", "<think>\nSo", True),
        ("So", "<think>\nSo", True),
        ("yes", "<think>\nSo</think>yes", False),
        ("text", "text", False),
    ],
)
def test_reasoning_that_the_prompt_opened_goes_on(prompt_end: str, continued: str, is_open: bool) -> None:
    dialect = dialect_of(TEMPLATES["reasoning"])
    plan = dialect.plan(None, None, lambda _: None, prompt_end=prompt_end, continued=continued)
    assert plan.new_parser is not None and plan.rule is None
    parser = plan.new_parser()
    pieces = joined([*parser.push("one</think>two"), *parser.finish()])
    if is_open:
        assert pieces == (ReasoningPiece("one"), ContentPiece("two"))
    else:
        assert pieces == (ContentPiece("one</think>two"),)
    assert {"<think>", "</think>"} <= plan.shown_special_tokens
