"""A chat template in the manner of gpt-oss', a tokenizer with its special tokens, a tiny model with both."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from support.tiny_checkpoints import save_random_checkpoint
from support.tiny_configs import gpt_oss_config
from tokenizers import AddedToken, decoders, models

from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.parsers.harmony import MARKERS

VOCAB_SIZE = 256
PAD, END_OF_TEXT, RETURN, CALL, END = 0, 1, 2, 3, 4
_SPECIAL_TOKENS = ("<pad>", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>")

# As the published one: reasoning under the name `thinking`, kept in front of calls until an answer followed,
# one call in a message, results under the name of the call before, and what it refuses.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% set first = 1 if messages[0].role in ('system', 'developer') else 0 %}"
    "{% if first or tools %}<|start|>developer<|message|>"
    "{% if first %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description + '\n' }}"
    "type {{ tool.function.name }} = "
    "{{ (tool.function.parameters or {}) | tojson }};\n{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages[first:] %}"
    "{% if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% elif message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('content beside thinking') }}{% endif %}"
    "{% set after = namespace(answer=false) %}{% for later in messages[first:][loop.index:] %}"
    "{% if later.role == 'assistant' and not later.tool_calls %}{% set after.answer = true %}{% endif %}"
    "{% endfor %}"
    "{% set thought = message.content or message.thinking %}"
    "{% if thought and not after.answer %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}"
    "<|end|>{% endif %}{% set call = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{% set last.name = call.name %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def harmony_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, special_tokens={})


def harmony_tokenizer() -> tokenizers.Tokenizer:
    """gpt-oss' special tokens, one character for every other token."""
    special = [*_SPECIAL_TOKENS, *(marker for marker in MARKERS if marker not in _SPECIAL_TOKENS)]
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    characters += [chr(ord("一") + index) for index in range(VOCAB_SIZE - len(special) - len(characters))]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def save_tiny_gpt_oss(directory: Path) -> Path:
    """Save a random gpt-oss of five layers. As in early files on the hub, none names <|call|>."""
    config = gpt_oss_config()
    config.max_position_embeddings = 4096
    config.eos_token_id = RETURN
    config.bos_token_id = None
    save_random_checkpoint(config, directory)
    harmony_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|return|>"}), encoding="utf-8"
    )
    ending = {"eos_token_id": [RETURN, END_OF_TEXT], "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(ending), encoding="utf-8")
    return directory
