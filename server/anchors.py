"""Anchors of a chat prompt: where the prompts of other chats, and of its own next turns, will part from it.

Nobody can read that from the messages alone, since a template merges, trims and drops text: Gemma's puts the
system text into the first user turn, others strip the reasoning of earlier turns. So another chat is rendered
that shares the messages up to a cut, and the two texts are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Cuts:
    """Character positions in a chat's prompt, in (0, length), below which other prompts will be the same.

    positions: ascending. head_end: the one of them where system text and tool list are both over, or 0.
    """

    positions: tuple[int, ...]
    head_end: int


def find_cuts(template: PromptTemplate, messages: Sequence[Message], rendering: Rendering, text: str) -> Cuts:
    """The cuts of `text`, the prompt of `messages`.

    They are the ends of the tool list, of the system message, of the last few messages, and of the prompt
    before its generation header. A cut that the template refuses to render is left out. Renders at most
    RECENT_MESSAGES + 7 times, whatever the number of messages: use a worker thread.
    """
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    head = [*messages[:num_system], _probe_in_place_of(messages, num_system)]
    head_end = _cut(text, template, head, rendering)
    others = {
        _cut(text, template, other_messages, other_rendering)
        for other_messages, other_rendering in _other_chats(messages, head, rendering)
    }
    return Cuts(tuple(sorted((others | {head_end}) - {0})), head_end)


def page_anchors(
    num_tokens_at_cuts: Sequence[int],
    num_head_tokens: int,
    *,
    num_prompt_tokens: int,
    page_size: int,
    window: int,
) -> tuple[int, ...]:
    """Anchors for Submit: token positions in (0, num_prompt_tokens), whole pages, ascending, each once.

    Inside the head, only those a window or more below its end: nearly every chat forks at its end, so the
    window there must be the first, and from a fork less than a window below little is computed again.
    """
    floors = {num_tokens // page_size * page_size for num_tokens in num_tokens_at_cuts}
    head = num_head_tokens // page_size * page_size
    return tuple(
        sorted(
            anchor
            for anchor in floors
            if 0 < anchor < num_prompt_tokens and (anchor >= head or anchor <= head - window)
        )
    )


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


def _cut(text: str, template: PromptTemplate, other: Sequence[Message], rendering: Rendering) -> int:
    """Where the prompt of `other` parts from `text`; 0 if nowhere, or if the template refuses it."""
    try:
        cut = common_prefix_length(text, rendering.text(template, other))
    except RequestError:
        return 0  # it wants other roles there: then no chat parts from this one there either
    return cut if cut < len(text) else 0


def _other_chats(
    messages: Sequence[Message], head: Sequence[Message], rendering: Rendering
) -> Iterator[tuple[Sequence[Message], Rendering]]:
    """Chats that share more than the head with this one, or a part of it, with the options to render them.

    The chat itself is the second continuation of every cut: what it says there is no probe.
    head: the system messages, and a probe.
    """
    num_system = len(head) - 1
    if rendering.tools and num_system > 0:
        # Tools come before the system text in some templates and after it in others.
        yield [{"role": "system", "content": PROBE}, head[-1]], rendering
        yield head, replace(rendering, tools=(_PROBE_TOOL,))
    for index in sorted(_cut_indices(messages, num_system)):
        yield [*messages[:index], _probe_in_place_of(messages, index)], rendering
    # The next turn of this chat: it shows what of the generation header and of the last reasoning stays.
    answer = [] if messages[-1]["role"] == "assistant" else [{"role": "assistant", "content": PROBE}]
    yield [*messages, *answer, {"role": "user", "content": PROBE}], rendering
    if rendering.add_generation_prompt:
        yield messages, replace(rendering, add_generation_prompt=False)


def _cut_indices(messages: Sequence[Message], num_system: int) -> set[int]:
    """Indices of the messages after the first in whose place another chat may say something else."""
    num_messages = len(messages)
    indices = set(range(max(num_system, num_messages - RECENT_MESSAGES), num_messages))
    question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if question is not None:
        indices.add(question)
        # Reasoning is often kept until the next question is asked: that chat forks right after this one.
        if question + 1 < num_messages:
            indices.add(question + 1)
    return indices - {num_system}


def _probe_in_place_of(messages: Sequence[Message], index: int) -> Message:
    """A message of the same role that says something else; beyond the last message, a user's."""
    if index >= len(messages):
        return {"role": "user", "content": PROBE}
    # A tool's answer names its call, which templates check.
    kept = {key: value for key, value in messages[index].items() if key in ("role", "name", "tool_call_id")}
    return {**kept, "content": PROBE}
