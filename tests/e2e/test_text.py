"""What a client reads: streams equal whole answers, stop strings, seeds, choices and usage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from support.served import ServedModel

PROMPT = "hello 日本語 world"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "low"},
    {"role": "user", "content": "hello"},
]


def streamed(served: ServedModel, **options: Any) -> tuple[dict[int, str], dict[int, str | None], Any]:
    """Texts and finish reasons by choice, and the usage, of a streamed completion."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    stream = served.openai.completions.create(
        model=served.model, stream=True, stream_options={"include_usage": True}, **options
    )
    assert isinstance(stream, openai.Stream)
    for chunk in stream:
        assert usage is None, "usage comes last"
        usage = chunk.usage
        assert (usage is not None) == (chunk.choices == [])
        for choice in chunk.choices:
            assert reasons.get(choice.index) is None, "nothing comes after the finish reason"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def whole(served: ServedModel, **options: Any) -> Completion:
    answer = served.openai.completions.create(model=served.model, **options)
    assert isinstance(answer, Completion)
    return answer


@pytest.mark.parametrize("seed", range(4))
def test_stream_equals_the_whole_answer_through_broken_utf8(fragments: ServedModel, seed: int) -> None:
    options = {"prompt": PROMPT, "max_tokens": 200, "temperature": 1.0, "seed": seed, "n": 3}
    answer = whole(fragments, **options)
    texts, reasons, usage = streamed(fragments, **options)
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}
    assert len(set(texts.values())) == 3, "the choices of one seed differ from each other"
    assert any("\ufffd" in text for text in texts.values())
    assert answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens
    assert usage.prompt_tokens == answer.usage.prompt_tokens


def test_usage_of_three_choices_is_their_sum_and_the_prompt_counts_once(fragments: ServedModel) -> None:
    """Case A4."""
    options = {"prompt": PROMPT, "max_tokens": 4, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    alone = whole(fragments, **options).usage
    answer = whole(fragments, **options, n=3)
    _, _, streamed_usage = streamed(fragments, **options, n=3)
    assert alone is not None and answer.usage is not None
    for usage in (answer.usage, streamed_usage):
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens == alone.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + 12


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_stop_string_is_found_in_the_text_wherever_tokens_end(fragments: ServedModel, length: int) -> None:
    """Cases A1 and A2: every start in the first characters, so token edges are crossed."""
    options: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    text = whole(fragments, **options).choices[0].text
    assert len(text) > 20
    for start in range(3, 12):
        stop = text[start : start + length]
        expected = text[: text.index(stop)]
        choice = whole(fragments, **options, stop=[stop]).choices[0]
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        texts, reasons, _ = streamed(fragments, **options, stop=["never there", stop])
        assert (texts, reasons) == ({0: expected}, {0: "stop"})
    fragments.wait_idle()


def test_stop_string_can_be_kept_in_the_answer(fragments: ServedModel) -> None:
    text = fragments.text(PROMPT, max_tokens=60, ignore_eos=True)
    stop = text[8:11]
    kept = fragments.text(PROMPT, max_tokens=60, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept == text[: text.index(stop) + len(stop)]


def test_stop_token_ends_the_answer_and_stays_out_of_it(fragments: ServedModel) -> None:
    answer = fragments.complete(PROMPT, max_tokens=5, ignore_eos=True, stop_token_ids=list(range(128)))
    again = fragments.complete(PROMPT, max_tokens=5, ignore_eos=True, stop_token_ids=list(range(128)))
    assert answer["choices"] == again["choices"]
    everything = [list(range(start, min(start + 128, 320))) for start in (0, 128, 256)]
    ended = [
        fragments.complete(PROMPT, max_tokens=5, ignore_eos=True, stop_token_ids=ids)["choices"][0]
        for ids in everything
    ]
    at_once = [choice for choice in ended if choice["finish_reason"] == "stop" and choice["text"] == ""]
    assert at_once, "the first token is in one of the three ranges"
    assert all(isinstance(choice["stop_reason"], int) for choice in at_once)


def test_seeded_request_does_not_depend_on_its_neighbours(fragments: ServedModel) -> None:
    """Case A12, at temperature 1 and with a cold and a warm cache."""
    options = {"temperature": 1.0, "seed": 42, "max_tokens": 40, "ignore_eos": True}
    fragments.flush()
    alone = fragments.text(PROMPT, **options)
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(fragments.text, f"{PROMPT} {index}", temperature=1.0, max_tokens=60)
            for index in range(6)
        ]
        beside = [pool.submit(fragments.text, PROMPT, **options) for _ in range(2)]
        assert [future.result() for future in beside] == [alone, alone]
        assert len({future.result() for future in others}) == 6
    assert fragments.text(PROMPT, **{**options, "seed": 43}) != alone


def test_chat_streams_what_it_answers_whole(fragments: ServedModel) -> None:
    options: dict[str, Any] = {"max_completion_tokens": 50, "temperature": 1.0, "seed": 7}
    answer = fragments.openai.chat.completions.create(model=fragments.model, messages=MESSAGES, **options)
    assert isinstance(answer, ChatCompletion) and answer.usage is not None
    stream = fragments.openai.chat.completions.create(
        model=fragments.model,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    assert isinstance(stream, openai.Stream)
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == answer.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_every_text_part_of_a_message_reaches_the_model(fragments: ServedModel) -> None:
    """Case A10."""

    def prompt_tokens(*texts: str) -> int:
        answer = fragments.openai.chat.completions.create(
            model=fragments.model,
            max_tokens=1,
            messages=[{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}],
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens("word " * 40, "Name a colour.") >= prompt_tokens("Name a colour.") + 40


@pytest.mark.parametrize("length", [16, 32, 64])
def test_prompt_that_is_cached_as_a_whole_still_answers(fragments: ServedModel, length: int) -> None:
    """Case A15."""
    prompt = [5 + (7 * index + length) % 300 for index in range(length)]
    first = fragments.complete(prompt, max_tokens=8, ignore_eos=True)
    second = fragments.complete(prompt, max_tokens=8, ignore_eos=True)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert length - 4 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1


def test_salts_never_share_cached_state(fragments: ServedModel) -> None:
    """Case C7."""
    prompt = [9 + (11 * index) % 300 for index in range(80)]

    def cached(salt: str | None) -> int:
        options = {} if salt is None else {"cache_salt": salt}
        usage = fragments.complete(prompt, max_tokens=1, **options)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("s") == 0
    assert cached("s") >= 76
    assert cached("t") == 0
    assert cached(None) == 0
    assert cached(None) >= 76
