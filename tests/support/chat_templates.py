"""Chat templates in the manner of well-known models, and a tokenizer with their special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import tokenizers
from text.tiny_tokenizers import byte_level
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.text import Tokenizer

GEMMA = resources.files("forkpoint.configs").joinpath("gemma_turns.jinja").read_text(encoding="utf-8")

# Qwen 2.5's ways: a system text of its own, tools after the system text, texts taken as they are.
CHATML = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are a helpful assistant.{% endif %}"
    "{% if tools %}\n\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "{% endif %}<|im_end|>\n"
    "{% for message in messages[1 if messages[0].role == 'system' else 0:] %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen 3's: reasoning stays until the next question; an answer after it gets an empty one.
REASONING = (
    "{% set ns = namespace(question=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% set answer = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in message.content else '' %}"
    "{% if loop.index0 > ns.question %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# Llama 3's: tools before the system text, texts trimmed.
LLAMA3 = (
    "{{ bos_token }}{% set first = 1 if messages[0].role == 'system' else 0 %}"
    "{% if first or tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools %}Environment: ipython\n{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}"
    "{% endif %}{% if first %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>{% endif %}"
    "{% for message in messages[first:] %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Mistral's: roles must alternate, tools stand before the last question, no generation header.
STRICT = (
    "{{ bos_token }}{% set first = 1 if messages[0].role == 'system' else 0 %}"
    "{% if first %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% set turns = messages[first:] %}"
    "{% set ns = namespace(question=-1) %}{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in turns %}{% if message.role == 'user' %}"
    "{% if tools and loop.index0 == ns.question %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)

TEMPLATES: Mapping[str, str] = {
    "gemma": GEMMA,
    "chatml": CHATML,
    "reasoning": REASONING,
    "llama3": LLAMA3,
    "strict": STRICT,
}
# How Llama 3 and Qwen cut a text into words: line breaks stay together, whatever follows them.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_TOKENS = (
    "<bos>",
    "</s>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)


def chat_template(name: str) -> CountingTemplate:
    return CountingTemplate(ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<bos>"}))


def chat_tokenizer(*, trims_offsets: bool = False) -> Tokenizer:
    """Bytes and a few merges, NFC, one token for each tag of the templates.

    trims_offsets: leave spaces out of the offsets of tokens, as Llama 3's file does.
    """
    backend: tokenizers.Tokenizer = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if trims_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return Tokenizer(backend, bos_token="<bos>")


class CountingTemplate:
    """A template that notes how many messages each rendering had."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.num_messages: list[int] = []

    @property
    def source(self) -> str:
        return self._template.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        self.num_messages.append(len(messages))
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
