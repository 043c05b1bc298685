"""Anchors of a chat prompt: where the prompts of other chats, and of its own next turns, will part from it.

Nobody can read that from the messages alone, since a template merges, trims and drops text: Gemma's puts the
system text into the first user turn, others strip the reasoning of earlier turns. So another chat is rendered
that shares the messages up to a cut, and the two texts are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from forkpoint.configs.errors import RequestError
from forkpoint.server.chat_messages import Message
from forkpoint.server.rendering import Rendering
from forkpoint.server.text_ports import PromptTemplate

# Cuts are made before each of the last few messages only: a rendering of 200 messages (120,000 characters)
# takes 1.5 to 6 ms with the GIL held (November 2026, two cores), and older turns left windows of their own
# when they were served.
RECENT_MESSAGES = 3
# Stands where the chat itself says something else. A private character, so that it differs from the first
# character of whatever the chat says there, and no template trims or escapes it.
PROBE = "\ue000"

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}},
}


def find_cuts(
    template: PromptTemplate, messages: Sequence[Message], rendering: Rendering, text: str
) -> tuple[int, ...]:
    """Character positions in `text`, the prompt of `messages`, below which other prompts will be the same.

    Ascending, in (0, len(text)): the ends of the tool list, the system message, the last few messages, and of
    the prompt before its generation header. A cut that the template refuses to render is left out. Renders at
    most RECENT_MESSAGES + 7 times, whatever the number of messages: use a worker thread.
    """
    cuts = set()
    for other_messages, other_rendering in _other_chats(messages, rendering):
        try:
            other = other_rendering.text(template, other_messages)
        except RequestError:
            continue  # the template wants other roles here: then no chat forks here either
        cuts.add(common_prefix_length(text, other))
    return tuple(sorted(cuts - {0, len(text)}))


def page_anchors(
    num_tokens_at_cuts: Sequence[int], num_prompt_tokens: int, page_size: int
) -> tuple[int, ...]:
    """Anchors for Submit: token positions in (0, num_prompt_tokens), whole pages, ascending, each once."""
    floors = {num_tokens // page_size * page_size for num_tokens in num_tokens_at_cuts}
    return tuple(sorted(anchor for anchor in floors if 0 < anchor < num_prompt_tokens))


def common_prefix_length(one: str, other: str) -> int:
    """Number of leading characters that are equal in both texts."""
    # Halving compares slices at the speed of memory: 0.1 ms where os.path.commonprefix takes 11.
    start, end = 0, min(len(one), len(other))
    while start < end:
        middle = (start + end + 1) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle - 1
    return start


def _other_chats(
    messages: Sequence[Message], rendering: Rendering
) -> Iterator[tuple[Sequence[Message], Rendering]]:
    """Chats that share the beginning of this one, with the options to render them.

    The chat itself is the second continuation of every cut: what it says there is no probe.
    """
    ends_open = replace(rendering, continue_final_message=False)
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if rendering.tools and num_system > 0:
        # Tools come before the system text in some templates and after it in others.
        first_turn = _probe_in_place_of(messages, num_system)
        yield [{"role": "system", "content": PROBE}, first_turn], ends_open
        yield [*messages[:num_system], first_turn], replace(ends_open, tools=(_PROBE_TOOL,))
    for index in sorted(_cut_indices(messages, num_system)):
        yield [*messages[:index], _probe_in_place_of(messages, index)], ends_open
    # The next turn of this chat: it shows what of the generation header and of the last reasoning stays.
    answer = [] if messages[-1]["role"] == "assistant" else [{"role": "assistant", "content": PROBE}]
    yield [*messages, *answer, {"role": "user", "content": PROBE}], ends_open
    if rendering.add_generation_prompt:
        yield messages, replace(rendering, add_generation_prompt=False)


def _cut_indices(messages: Sequence[Message], num_system: int) -> set[int]:
    """Indices of the messages in whose place another chat may say something else."""
    num_messages = len(messages)
    indices = {num_system, *range(max(num_system, num_messages - RECENT_MESSAGES), num_messages)}
    question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if question is not None:
        indices.add(question)
        # Reasoning is often kept until the next question is asked: that chat forks right after this one.
        if question + 1 < num_messages:
            indices.add(question + 1)
    return indices


def _probe_in_place_of(messages: Sequence[Message], index: int) -> Message:
    """A message of the same role that says something else; beyond the last message, a user's."""
    if index >= len(messages):
        return {"role": "user", "content": PROBE}
    # A tool's answer names its call, which templates check.
    kept = {key: value for key, value in messages[index].items() if key in ("role", "name", "tool_call_id")}
    return {**kept, "content": PROBE}
