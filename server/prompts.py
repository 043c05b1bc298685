"""From the prompt of a request, in any of its four forms or as chat messages, to checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.configs.errors import RequestError
from forkpoint.server.anchors import find_cuts, page_anchors
from forkpoint.server.chat_messages import Message, num_characters
from forkpoint.server.fields import json_type
from forkpoint.server.limits import Limits
from forkpoint.server.rendering import Rendering
from forkpoint.server.text_ports import PromptTemplate, TextTokenizer

MAX_PROMPTS = 1024
# Enough for a tag that a template writes last.
_TEXT_END_CHARS = 64

TokenIds = NDArray[np.int32]


def read_prompts(value: object, limits: Limits) -> list[str | TokenIds]:
    """`prompt` of a completions request: a string, a list of strings, of token ids, or of lists of ids.

    Token ids are taken as they are. Raises RequestError, for ids that the model does not have too.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _prompt_error(f"must be a string or a list, not {json_type(value)}")
    if not value:
        raise _prompt_error("is an empty list")
    if isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise _prompt_error(f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if all(isinstance(prompt, list) for prompt in value):
            return [_read_token_ids(prompt, limits) for prompt in value]
        raise _prompt_error("mixes strings and lists")
    return [_read_token_ids(value, limits)]


async def encode(
    text: str, tokenizer: TextTokenizer, limits: Limits, *, add_special_tokens: bool
) -> TokenIds:
    """Token ids of a text, made in a worker thread, checked against vocabulary, context and pools."""
    limits.check_num_characters(len(text), tokenizer.max_token_characters)
    token_ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    _check_token_ids(token_ids, limits)
    return token_ids


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """anchors: see Submit. text_end: the last characters of the prompt's text."""

    token_ids: TokenIds
    anchors: tuple[int, ...]
    text_end: str


async def render_and_encode(
    template: PromptTemplate,
    messages: Sequence[Message],
    rendering: Rendering,
    tokenizer: TextTokenizer,
    limits: Limits,
) -> RenderedChat:
    """The prompt of a chat, made in worker threads, and checked as encode() does.

    Raises RequestError.
    """
    # A template may add text but drops none of what matters here, so this bounds the rendered text too.
    limits.check_num_characters(num_characters(messages), tokenizer.max_token_characters)
    text = await asyncio.to_thread(rendering.text, template, messages)
    window = limits.info.window
    if window is None:  # full-attention state is reusable at any position: there is nothing to keep
        token_ids = await encode(text, tokenizer, limits, add_special_tokens=rendering.add_special_tokens)
        return RenderedChat(token_ids, (), text[-_TEXT_END_CHARS:])
    limits.check_num_characters(len(text), tokenizer.max_token_characters)
    cuts = await asyncio.to_thread(find_cuts, template, messages, rendering, text)
    token_ids, (num_head_tokens, *num_tokens_at_cuts) = await asyncio.to_thread(
        tokenizer.encode_with_cuts,
        text,
        (cuts.head_end, *cuts.positions),
        add_special_tokens=rendering.add_special_tokens,
    )
    _check_token_ids(token_ids, limits)
    anchors = page_anchors(
        num_tokens_at_cuts,
        num_head_tokens,
        num_prompt_tokens=len(token_ids),
        page_size=limits.info.page_size,
        window=window,
    )
    return RenderedChat(token_ids, anchors, text[-_TEXT_END_CHARS:])


def _check_token_ids(token_ids: TokenIds, limits: Limits) -> None:
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    # Gemma 3's tokenizer has a token for images that the text model has no row for.
    if int(token_ids.max()) >= limits.info.vocab_size:
        raise RequestError(
            f"the prompt contains a special token (id {int(token_ids.max())}) that this model does not have; "
            f"its vocabulary has {limits.info.vocab_size}"
        )
    limits.check_prompt(len(token_ids))


def _read_token_ids(value: list[object], limits: Limits) -> TokenIds:
    if not value:
        raise _prompt_error("is an empty list")
    limits.check_prompt(len(value))  # before looking at each of a million ids
    vocab_size = limits.info.vocab_size
    for token_id in value:
        if type(token_id) is not int:
            raise _prompt_error(f"must hold token ids or strings alone, but holds {json_type(token_id)}")
        if not 0 <= token_id < vocab_size:
            raise _prompt_error(f"holds the token id {token_id}; ids must be in [0, {vocab_size})")
    return np.array(value, dtype=np.int32)


def _prompt_error(problem: str) -> RequestError:
    return RequestError(f"prompt {problem}", param="prompt")
