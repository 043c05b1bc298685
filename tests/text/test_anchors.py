"""Anchors of chat prompts: another chat that shares the messages below one has the same tokens there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.chat_templates import CountingTemplate, chat_template, chat_tokenizer

from forkpoint.server.anchors import RECENT_MESSAGES, common_prefix_length, find_cuts, page_anchors
from forkpoint.server.chat_messages import Message
from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.rendering import Rendering
from forkpoint.server.text import Tokenizer

MARGIN = 16  # what the cache keeps below each window: a fork this close below an anchor costs nothing
TOKENIZER = chat_tokenizer()
TRIMMING_TOKENIZER = chat_tokenizer(trims_offsets=True)
SYSTEM = "Be short, and name your sources."


def say(*texts: str, system: str | None = None) -> list[Message]:
    """A chat of alternating turns, the user's first."""
    turns: list[Message] = [
        {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


@dataclass
class Server:
    """What the chat API does to a prompt, with pages of one token."""

    name: str
    rendering: Rendering = field(default_factory=Rendering)
    tokenizer: Tokenizer = TOKENIZER

    def __post_init__(self) -> None:
        self.template: CountingTemplate = chat_template(self.name)

    def tokens(self, messages: Sequence[Message], **changes: Any) -> list[int]:
        text = replace(self.rendering, **changes).text(self.template, messages)
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).tolist()
        return token_ids

    def anchors(self, messages: Sequence[Message], window: int = 0) -> tuple[int, ...]:
        text = self.rendering.text(self.template, messages)
        cuts = find_cuts(self.template, messages, self.rendering, text)
        token_ids, (num_head_tokens, *num_tokens) = self.tokenizer.encode_with_cuts(
            text, (cuts.head_end, *cuts.positions), add_special_tokens=False
        )
        assert token_ids.tolist() == self.tokens(messages)
        return page_anchors(
            num_tokens, num_head_tokens, num_prompt_tokens=len(token_ids), page_size=1, window=window
        )

    def fork(self, messages: Sequence[Message], others: Sequence[Message], **changes: Any) -> int:
        """Number of leading tokens that the prompts of both chats share."""
        one, other = self.tokens(messages), self.tokens(others, **changes)
        num_shared = min(len(one), len(other))
        return next((i for i in range(num_shared) if one[i] != other[i]), num_shared)


ALL = ["gemma", "chatml", "reasoning", "llama3", "strict"]


@pytest.mark.parametrize("name", ALL)
def test_system_anchor_is_the_same_for_every_user(name: str) -> None:
    server = Server(name)
    chats = [say("Hello", system=SYSTEM), say("What?", "That.", "naïve 日本", system=SYSTEM)]
    forks = server.fork(*chats)
    assert forks > 20
    for chat in chats:
        assert forks in server.anchors(chat)
        assert server.tokens(chat)[:forks] == server.tokens(chats[0])[:forks]


@pytest.mark.parametrize("name", ["chatml", "reasoning", "llama3", "gemma"])
def test_end_before_the_generation_header_is_an_anchor(name: str) -> None:
    server = Server(name)
    chat = say("one", "two", "three", system=SYSTEM)
    end = len(server.tokens(chat, add_generation_prompt=False))
    assert end < len(server.tokens(chat))
    assert end in server.anchors(chat)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_turns", [1, 3, 9])
def test_edit_of_a_recent_message_forks_at_an_anchor(name: str, num_turns: int) -> None:
    server = Server(name)
    chat = say(*[f"turn {index} says naïve 🚂" for index in range(num_turns)], system=SYSTEM)
    anchors = server.anchors(chat)
    for index in range(max(1, len(chat) - RECENT_MESSAGES), len(chat)):
        edited = [*chat[:index], {**chat[index], "content": "Another"}]
        if chat[index]["role"] == "assistant":
            edited.append({"role": "user", "content": "more"})
        assert server.fork(chat, edited) in anchors, index


@pytest.mark.parametrize("name", ALL)
def test_next_turn_forks_at_an_anchor_or_at_the_end(name: str) -> None:
    server = Server(name)
    chat = say("one", "two", "three", system=SYSTEM)
    fork = server.fork(chat, [*chat, *say("x", "an answer", "and then?")[1:]])
    assert fork in (*server.anchors(chat), len(server.tokens(chat)))


def test_next_turn_without_an_empty_thought_in_it_forks_at_an_anchor() -> None:
    server = Server("reasoning", Rendering(template_kwargs={"enable_thinking": False}))
    chat = say("one", system=SYSTEM)
    fork = server.fork(chat, [*chat, *say("x", "an answer", "and then?")[1:]])
    header = len(server.tokens(chat, add_generation_prompt=False))
    assert header < fork < len(server.tokens(chat))
    assert fork in server.anchors(chat)


def test_stripped_reasoning_forks_at_an_anchor() -> None:
    server = Server("reasoning")
    loop: list[Message] = [
        {"role": "assistant", "content": "<think>\nlet me look\n</think>\n\nlook"},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": "<think>\nonce more\n</think>\n\nlook"},
        {"role": "tool", "content": "sun", "tool_call_id": "2"},
    ]
    chat = [*say("earlier", "said", "weather?", system=SYSTEM), *loop]
    anchors = server.anchors(chat)
    fork = server.fork(chat, [*chat, *say("x", "It is sunny.", "thanks")[1:]])
    assert fork < len(server.tokens(chat[:4])) + 3, "all the reasoning goes when the next question comes"
    assert fork in anchors
    # While the loop goes on it stays, and the chat forks at its end only.
    goes_on = [*chat, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nlook"}]
    assert server.fork(chat, goes_on) == len(server.tokens(chat))


def test_in_a_long_tool_loop_the_question_and_what_came_after_it_are_forks() -> None:
    server = Server("chatml")
    loop: list[Message] = [
        {"role": role, "content": f"step {index}", "tool_call_id": "1"}
        for index in range(5)
        for role in ("assistant", "tool")
    ]
    question = say("earlier", "said", "weather?", system=SYSTEM)
    chat = [*question, *loop]
    for index in (len(question) - 1, len(question)):
        other = [*chat[:index], {"role": chat[index]["role"], "content": "Another"}]
        assert server.fork(chat, other) in server.anchors(chat), index


def test_tool_list_and_system_text_have_anchors_of_their_own() -> None:
    chat = say("Hello", system=SYSTEM)
    for name, tools_come_first in (("chatml", False), ("llama3", True)):
        server = Server(name, Rendering(tools=(tool("weather"), tool("time"))))
        anchors = server.anchors(chat)
        other_user = server.fork(chat, say("What?", system=SYSTEM))
        other_system = server.fork(chat, say("Hello", system="You name no sources."))
        other_tools = server.fork(chat, chat, tools=(tool("stocks"),))
        assert other_user in anchors
        assert other_user > max(other_system, other_tools)
        assert (other_system > other_tools) is tools_come_first
        first_fork = other_system if tools_come_first else other_tools
        assert first_fork > 20
        assert first_fork in anchors


def test_tools_that_move_to_the_last_question_fork_before_it() -> None:
    server = Server("strict", Rendering(tools=(tool("weather"),)))
    chat = say("one", "two", "three", system=SYSTEM)
    fork = server.fork(chat, [*chat, *say("x", "four", "five")[1:]])
    assert fork < len(server.tokens(chat, tools=()))
    assert fork in server.anchors(chat)


def test_default_system_text_of_the_template_is_an_anchor() -> None:
    server = Server("chatml")
    chat = say("Hello")
    fork = server.fork(chat, say("What?"))
    assert fork > 10
    assert fork in server.anchors(chat)


def test_what_the_template_refuses_is_no_anchor_and_no_error() -> None:
    server = Server("strict")
    only_system: list[Message] = [{"role": "system", "content": SYSTEM}]
    # A question may follow, so the system text is a fork; no other chat than that gets through.
    assert server.anchors(only_system) == ()
    assert server.fork(only_system, say("Hello", system=SYSTEM)) == len(server.tokens(only_system))
    answered = say("one", "two", system=SYSTEM)
    assert server.fork(answered, say("Hello", system=SYSTEM)) in server.anchors(answered)


def test_a_probe_in_place_of_a_tools_answer_names_its_call() -> None:
    source = (
        "{% for message in messages %}"
        "{% if message.role == 'tool' and not (message.tool_call_id and message.name) %}"
        "{{ raise_exception('a tool message needs the call it answers') }}{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    server = Server("chatml", Rendering(add_generation_prompt=False))
    server.template = CountingTemplate(ChatTemplate(source, special_tokens={}))
    call = {"role": "tool", "name": "f", "tool_call_id": "1"}
    chat = [*say("weather?", "look"), {**call, "content": "rain"}]
    other = [*say("weather?", "look"), {**call, "content": "sun"}]
    assert server.fork(chat, other) in server.anchors(chat)


def test_continued_message_leaves_anchors_below_it() -> None:
    server = Server("llama3", Rendering(add_generation_prompt=False, continue_final_message=True))
    chat = say("one", "The capital is", system=SYSTEM)
    anchors = server.anchors(chat)
    fork = server.fork(chat, say("one", "A capital", system=SYSTEM))
    assert fork in anchors
    assert anchors[-1] <= len(server.tokens(chat))


def test_content_parts_are_cut_as_strings_are() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for name in ALL:
        server = Server(name)
        in_parts: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": parts},
        ]
        assert server.anchors(in_parts) == server.anchors(say("one\ntwo", system=SYSTEM)), name


def test_a_long_chat_is_rendered_a_few_times_only() -> None:
    for name in ALL:
        server = Server(name, Rendering(tools=(tool("weather"),)))
        chat = say(*[f"turn {index}" for index in range(199)], system=SYSTEM)
        text = server.rendering.text(server.template, chat)
        server.template.num_messages.clear()
        assert find_cuts(server.template, chat, server.rendering, text)
        renderings = server.template.num_messages
        assert len(renderings) <= RECENT_MESSAGES + 7
        assert sum(num > 10 for num in renderings) <= RECENT_MESSAGES + 3


def test_anchors_are_whole_pages_below_the_prompts_end() -> None:
    def anchors(*cuts: int, page_size: int) -> tuple[int, ...]:
        return page_anchors(cuts, 0, num_prompt_tokens=64, page_size=page_size, window=8)

    assert anchors(3, 15, 16, 17, 31, 48, 50, 64, page_size=16) == (16, 48)
    assert anchors(9, 2, 2, 63, 64, page_size=1) == (2, 9, 63)
    assert anchors(page_size=1) == ()


def test_inside_the_head_anchors_stay_a_window_or_more_below_its_end() -> None:
    def anchors(window: int) -> tuple[int, ...]:
        return page_anchors((10, 40, 90), 40, num_prompt_tokens=100, page_size=1, window=window)

    assert anchors(30) == (10, 40, 90)
    assert anchors(31) == (40, 90)


def test_first_anchor_ends_tools_and_system_text_together() -> None:
    chat = say("Hello", "yes", "What?", system=SYSTEM)
    for name in ("chatml", "llama3"):
        server = Server(name, Rendering(tools=(tool("weather"), tool("time"))))
        fork = server.fork(chat, say("Bye", system=SYSTEM))
        assert server.anchors(chat, window=512)[0] == fork
        assert server.anchors(chat, window=1)[0] < fork


# ---- properties

TEXTS = st.text(alphabet="abelordwHW \n\t.,'1ö日本語🚂\u0301<>[]|", max_size=12)
STARTS = st.sampled_from("acegikmo")
OTHER_STARTS = st.sampled_from("bdfhjlnp")


@st.composite
def _chats(draw: st.DrawFn, starts: st.SearchStrategy[str], others: st.SearchStrategy[str]) -> Any:
    """A chat that ends with a question, an index in it, and a chat that parts from it there."""
    num_turns = 2 * draw(st.integers(0, 4)) + 1
    system = draw(st.none() | st.builds(str.__add__, starts, TEXTS))
    chat = say(*[draw(starts) + draw(TEXTS) for _ in range(num_turns)], system=system)
    num_system = len(chat) - num_turns
    indices = {num_system, *range(max(num_system, len(chat) - RECENT_MESSAGES), len(chat))}
    index = draw(st.sampled_from(sorted(indices)))
    other = [*chat[:index], {**chat[index], "content": draw(others) + draw(TEXTS)}]
    for _ in range(draw(st.integers(0, 3))):
        role = "user" if other[-1]["role"] == "assistant" else "assistant"
        other.append({"role": role, "content": draw(TEXTS)})
    return chat, other


@settings(max_examples=150, deadline=None)
@given(_chats(STARTS, OTHER_STARTS), st.sampled_from(["gemma", "chatml", "llama3", "strict"]), st.booleans())
def test_other_chats_fork_exactly_at_an_anchor(chats: Any, name: str, trims_offsets: bool) -> None:
    chat, other = chats
    server = Server(name, tokenizer=TRIMMING_TOKENIZER if trims_offsets else TOKENIZER)
    fork = server.fork(chat, other)
    assert fork in (*server.anchors(chat), 0, len(server.tokens(chat)))


@settings(max_examples=150, deadline=None)
@given(_chats(TEXTS, TEXTS), st.sampled_from(ALL), st.booleans())
def test_other_chats_fork_within_the_margin_whatever_they_begin_with(
    chats: Any, name: str, trims_offsets: bool
) -> None:
    """A token may span the fork, and the next text may change the token before it: a few tokens, no more."""
    chat, other = chats
    assume(
        all(
            one["content"][:1] != two["content"][:1]
            for one, two in zip(chat, other, strict=False)
            if one != two
        )
    )
    server = Server(name, tokenizer=TRIMMING_TOKENIZER if trims_offsets else TOKENIZER)
    fork = server.fork(chat, other)
    anchors = (*server.anchors(chat), 0, len(server.tokens(chat)))
    assert any(abs(anchor - fork) <= MARGIN for anchor in anchors)


@settings(max_examples=100, deadline=None)
@given(_chats(STARTS, OTHER_STARTS), st.sampled_from(ALL))
def test_every_anchor_is_a_fork_of_some_other_chat(chats: Any, name: str) -> None:
    """No anchor lies where no chat parts: each is the fork with one that shares the messages up to there."""
    chat, _ = chats
    server = Server(name)
    forks = {
        server.fork(chat, [*chat[:index], {**chat[index], "content": "z"}]) for index in range(len(chat))
    }
    forks.add(server.fork(chat, [*chat, *say("x", "z", "z")[1:]]))
    forks.add(server.fork(chat, chat, add_generation_prompt=False))
    assert set(server.anchors(chat)) <= forks


@given(TEXTS, TEXTS, TEXTS)
def test_common_prefix_is_what_both_texts_begin_with(start: str, one: str, other: str) -> None:
    length = common_prefix_length(start + one, start + other)
    assert length >= len(start)
    assert (start + one)[:length] == (start + other)[:length]
    assert (start + one)[length : length + 1] != (start + other)[length : length + 1] or length == len(
        start + one
    ) == len(start + other)
