"""Chat templates: rendered as transformers renders them, parts kept whole, refusals as bad requests."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from text.tiny_tokenizers import sentencepiece_like
from transformers import PreTrainedTokenizerFast

from forkpoint.configs.errors import ConfigError, ModelLoadError, RequestError
from forkpoint.server.chat_template import ChatTemplate, join_text_parts

GEMMA = resources.files("forkpoint.configs").joinpath("gemma_turns.jinja").read_text(encoding="utf-8")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{%- generation %}{{ message['content'] }}{%- endgeneration %}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
# As Gemma's own template does it: of a system message in parts, only the first part arrives.
LOSES_PARTS = (
    "{% if messages[0].role == 'system' %}"
    "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}{% endif %}"
    "{% for message in messages if message.role != 'system' %}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be short. "},
    {"role": "user", "content": "Hi <b>you</b>"},
    {"role": "assistant", "content": "Hello 🚂", "tool_calls": None},
    {"role": "user", "content": "Bye\n"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("source", [GEMMA, CHATML, LLAMA3], ids=["gemma", "chatml", "llama3"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["prompt", "no_prompt", "tools", "kwargs", "continue"],
)
def test_rendering_equals_that_of_transformers(source: str, options: dict[str, Any]) -> None:
    peer = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_like(), bos_token="<bos>", eos_token="<eos>"
    )
    expected = peer.apply_chat_template(CHAT, chat_template=source, tokenize=False, **options)
    own_options = dict(options)
    kwargs = {"enable_thinking": own_options.pop("enable_thinking")} if "enable_thinking" in options else {}
    assert template(source).render(CHAT, template_kwargs=kwargs, **own_options) == expected


def test_gemma_turns_put_the_system_text_into_the_first_user_turn() -> None:
    assert template(GEMMA).render(CHAT) == (
        "<bos><start_of_turn>user\nBe short.\n\nHi <b>you</b><end_of_turn>\n"
        "<start_of_turn>model\nHello 🚂<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma_turns_refuse_what_gemma_does_not_know() -> None:
    for messages, reason in (
        ([{"role": "tool", "content": "x"}], "role tool"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "must come before"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    ):
        with pytest.raises(RequestError, match=reason) as raised:
            template(GEMMA).render(messages)
        assert raised.value.status == 400


def test_one_text_part_renders_as_the_string_does() -> None:
    for source in (GEMMA, CHATML, LLAMA3, LOSES_PARTS):
        one = template(source)
        assert one.render([{"role": "user", "content": parts("Hi")}]) == one.render(
            [{"role": "user", "content": "Hi"}]
        )


def test_parts_are_joined_where_the_template_would_lose_or_print_them() -> None:
    for source in (CHATML, LLAMA3, LOSES_PARTS):
        assert not template(source).accepts_content_parts
        rendered = template(source).render([{"role": "system", "content": parts("one", "two")}])
        assert "one\ntwo" in rendered
    assert template(GEMMA).accepts_content_parts
    assert "one\ntwo" in template(GEMMA).render([{"role": "user", "content": parts("one", "two")}])


def test_joining_parts_drops_none() -> None:
    assert join_text_parts(parts("a", "", "b")) == "a\n\nb"
    with pytest.raises(RequestError, match="input_audio"):
        join_text_parts([*parts("a"), {"type": "input_audio"}])


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": parts("a", "b"), "name": None}]
    before = json.dumps(messages)
    template(CHATML).render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_template_kwargs_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError, match=name) as raised:
        template(CHATML).render(CHAT, template_kwargs={name: []})
    assert raised.value.param == "chat_template_kwargs"


def test_both_ways_to_end_the_prompt_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="only one"):
        template(CHATML).render(CHAT, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.text }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        template(source).render(CHAT)


def test_a_template_that_is_no_jinja_does_not_load() -> None:
    with pytest.raises(ModelLoadError, match=r"line 1"):
        template("{% for %}")


def test_load_finds_the_template_of_each_layout(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, None) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}1"}))
    assert load(tmp_path) == "<s>1"
    named = [{"name": "default", "template": "2"}, {"name": "tool_use", "template": "2 with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path) == "2"
    assert load(tmp_path, tools=[{"type": "function"}]) == "2 with tools"
    config.write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "3"}))
    assert load(tmp_path) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    assert load(tmp_path) == "4"
    (tmp_path / "mine.jinja").write_text("5")
    assert load(tmp_path, tmp_path / "mine.jinja") == "5"


def load(model_dir: Path, override: Path | None = None, tools: list[dict[str, Any]] | None = None) -> str:
    loaded = ChatTemplate.load(model_dir, override)
    assert loaded is not None
    return loaded.render(CHAT, tools=tools)


def test_a_template_file_that_is_missing_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jinja") as raised:
        ChatTemplate.load(tmp_path, tmp_path / "absent.jinja")
    assert raised.value.hint is not None and "--chat-template" in raised.value.hint
