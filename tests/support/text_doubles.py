"""Tokenizer and chat template doubles: bytes are tokens, and the template shows exactly what it was given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.configs.errors import RequestError
from forkpoint.server.detokenize import IncrementalDetokenizer

BOS, EOS, SPECIAL = 256, 257, 258
VOCAB_SIZE = 260
BEYOND_VOCABULARY = "<image>"  # becomes the id 300, as Gemma 3's image token does


class ByteTokenizer:
    """Token ids are the bytes of the text, after BOS; EOS ends a text; SPECIAL shows as <special>."""

    eos_token_ids = frozenset({EOS})
    bos_token_id = BOS
    max_token_characters = 1

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        self.num_encoded += 1
        ids = [300] if text == BEYOND_VOCABULARY else list(text.encode())
        return np.array([BOS, *ids] if add_special_tokens else ids, dtype=np.int32)

    def encode_with_cuts(
        self, text: str, cuts: Sequence[int], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], tuple[int, ...]]:
        num_before = 1 if add_special_tokens else 0
        num_tokens_at_cuts = tuple(num_before + len(text[:cut].encode()) for cut in cuts)
        return self.encode(text, add_special_tokens=add_special_tokens), num_tokens_at_cuts

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown_special_tokens: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        def token_bytes(token_id: int) -> bytes:
            is_skipped = skip_special_tokens and "<special>" not in shown_special_tokens
            return b"" if token_id >= 256 and is_skipped else self.token_bytes(token_id)

        return IncrementalDetokenizer(token_bytes)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def special_token_id(self, text: str) -> int | None:
        return SPECIAL if text == "<special>" else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<special>"


class TagTemplate:
    """Renders `role:content|` per message; joins parts with a line break; refuses the text "refuse me".

    refuses_longer_than: chats of more messages are refused too. knows_tools: tools stand before the messages.
    """

    source = ""

    def __init__(self, *, knows_tools: bool = False) -> None:
        self._knows_tools = knows_tools
        self.calls: list[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []
        self.refuses_longer_than: int | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        self.calls.append((messages, dict(template_kwargs or {})))
        if add_generation_prompt and continue_final_message:
            raise RequestError("both are true", param="continue_final_message")
        json.dumps(template_kwargs)
        lines = [f"{message['role']}:{_text(message.get('content'))}" for message in messages]
        is_too_long = self.refuses_longer_than is not None and len(lines) > self.refuses_longer_than
        if is_too_long or any("refuse me" in line for line in lines):
            raise RequestError("the chat template refuses these messages", param="messages")
        if tools and self._knows_tools:
            lines.insert(0, json.dumps(list(tools)))
        text = "|".join(lines) + ("" if continue_final_message else "|")
        return text + "assistant:" if add_generation_prompt else text


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
