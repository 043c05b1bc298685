"""Chats that part from each other: each finds all that it shares cached, with the window it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.served import ServedModel, serve_ready

from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.text import Tokenizer

PAGE_SIZE = 4
# Windows of 32 tokens in three layers: what a missing one costs is seen in rebuilt_tokens.
ROOMY = ("--page-size", str(PAGE_SIZE), "--max-total-tokens", "20000", "--swa-total-tokens", "8000")
# Less than a margin: from a fork so close to a kept window nothing worth mentioning is computed again.
FEW_TOKENS = 16
SYSTEM = "You are a careful clerk. " + "Answer in one sentence, and name the page you read. " * 6

# The header of an answer ends with "<t>\n", which no turn of the history has: the last 4 tokens of a prompt
# are gone in the next one. What an answer thinks is kept until the next question.
TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(question=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ message.role }}:"
    "{{ message.content.split('</think>')[-1] if loop.index0 < ns.question else message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:<t>\n{% endif %}"
)

Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server with TEMPLATE, and what its prompts look like."""

    served: ServedModel
    template: ChatTemplate
    tokenizer: Tokenizer

    def ask(self, messages: Chat, **options: Any) -> Mapping[str, Any]:
        """The usage of a short answer."""
        body = {"messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **options}
        response = self.served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        usage: Mapping[str, Any] = response.json()["usage"]
        return usage

    def fork(self, one: Chat, other: Chat) -> int:
        """Number of leading tokens that both prompts share, in whole pages."""
        first, second = self.prompt(one), self.prompt(other)
        num_shared = next(i for i in range(len(first) + 1) if first[i : i + 1] != second[i : i + 1])
        return num_shared // PAGE_SIZE * PAGE_SIZE

    def prompt(self, messages: Chat) -> Sequence[int]:
        token_ids: list[int] = self.tokenizer.encode(self.template.render(messages)).tolist()
        return token_ids


# Under lru a window stays where it is kept, and nowhere else: what passes there needs its anchors.
@pytest.fixture(scope="module", params=["lru", "cost"])
def chats(
    letters_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ChatServer]:
    file = tmp_path_factory.mktemp("template") / "turns.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    template = ChatTemplate.load(letters_dir, file)
    assert template is not None
    flags = (*ROOMY, "--radix-eviction-policy", request.param, "--chat-template", str(file))
    with serve_ready(letters_dir, *flags) as served:
        yield ChatServer(served, template, Tokenizer.load(letters_dir))
        served.flush()


@pytest.fixture(autouse=True)
def _empty_cache(chats: ChatServer) -> None:
    chats.served.flush()


def say(*texts: str) -> Chat:
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def assert_reuses(usage: Mapping[str, Any], fork: int) -> None:
    """All below the fork was served from the cache, and next to nothing of it rebuilt."""
    details = usage["prompt_tokens_details"]
    cached, rebuilt = details["cached_tokens"], details["rebuilt_tokens"]
    assert cached + rebuilt >= min(fork, usage["prompt_tokens"] - PAGE_SIZE), (usage, fork)
    assert rebuilt < FEW_TOKENS, (usage, fork)


QUESTION = "What is on the third page of the book about the railway?"
ANSWER = "A map of the northern line, with all of its stations."


def test_second_request_of_a_system_prompt_finds_it(chats: ChatServer) -> None:
    first, second = say(QUESTION), say("And who wrote the letters?")
    assert chats.ask(first)["prompt_tokens_details"]["cached_tokens"] == 0
    fork = chats.fork(first, second)
    assert fork > len(SYSTEM)
    usage = chats.ask(second)
    assert_reuses(usage, fork)
    assert usage["prompt_tokens_details"]["rebuilt_tokens"] == 0


def test_eight_that_arrive_together_compute_their_system_prompt_once(chats: ChatServer) -> None:
    together = [say(f"{number}: {QUESTION}") for number in range(8)]
    fork = chats.fork(together[0], together[1])
    with ThreadPoolExecutor(len(together)) as pool:
        usages = list(pool.map(chats.ask, together))
    details = [usage["prompt_tokens_details"] for usage in usages]
    served = sorted(each["cached_tokens"] + each["rebuilt_tokens"] for each in details)
    assert served[0] == 0, "somebody must compute it"
    assert served[1] >= fork, "and nobody else"
    assert sum(each["rebuilt_tokens"] for each in details) == 0


def test_regenerating_an_answer_reuses_the_whole_prompt(chats: ChatServer) -> None:
    chat = say(QUESTION, ANSWER, "Where is it kept?")
    chats.ask(chat)
    usage = chats.ask(chat, seed=5, temperature=1)
    assert_reuses(usage, usage["prompt_tokens"])


def test_edit_of_the_last_message_reuses_all_before_it(chats: ChatServer) -> None:
    chat, edited = say(QUESTION, ANSWER, "Where is it kept?"), say(QUESTION, ANSWER, "How old is it?")
    fork = chats.fork(chat, edited)
    assert fork > len(SYSTEM + QUESTION + ANSWER)
    chats.ask(chat)
    assert_reuses(chats.ask(edited), fork)


def test_edit_of_the_message_before_reuses_all_before_that(chats: ChatServer) -> None:
    chat = say(QUESTION, ANSWER, "Where is it kept? " * 4)
    edited = say(QUESTION, "Nothing at all is there.", "Where is it kept?")
    fork = chats.fork(chat, edited)
    chats.ask(chat)
    assert_reuses(chats.ask(edited), fork)


def test_follow_up_without_the_last_four_tokens_reuses_all_but_them(chats: ChatServer) -> None:
    chat = say(QUESTION)
    follow_up = say(QUESTION, ANSWER, "Where is it kept?")
    fork = chats.fork(chat, follow_up)
    assert 4 <= len(chats.prompt(chat)) - fork < 4 + PAGE_SIZE
    chats.ask(chat, max_tokens=60)  # more than a window: the answer's own tokens are no help
    assert_reuses(chats.ask(follow_up), fork)


def test_reasoning_stripped_from_the_history_forks_at_a_window(chats: ChatServer) -> None:
    """A tool loop seen as a whole for the first time, and its next question, which drops all reasoning."""
    loop: Chat = [
        {
            "role": "assistant",
            "content": "<think>I have to look it up, in the book on page three.</think>look",
        },
        {"role": "tool", "content": "a map, drawn by hand", "tool_call_id": "1"},
        {"role": "assistant", "content": "<think>That is not enough; there must be a legend.</think>look"},
        {"role": "tool", "content": "stations, in red ink", "tool_call_id": "2"},
    ]
    chat = [*say(QUESTION), *loop]
    next_question = [*chat, *say("", ANSWER, "Where is it kept?")[2:]]
    fork = chats.fork(chat, next_question)
    assert len(SYSTEM + QUESTION) < fork < len(chats.prompt(chat)) - 100
    chats.ask(chat)
    assert_reuses(chats.ask(next_question), fork)
