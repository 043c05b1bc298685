"""The official client against a whole server, synchronous and asynchronous: every call that people make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion
from support.served import PATIENCE_S, ServedModel, serve_ready

NAME = "some-org/tiny-model"
USER: Any = [{"role": "user", "content": "hello there"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


class Answer(pydantic.BaseModel):
    """What a structured answer must be; every field bounded, since a random model would never stop."""

    model_config = pydantic.ConfigDict(extra="forbid")
    is_known: bool


@pytest.fixture(scope="module")
def served(letters_dir: Path) -> Iterator[ServedModel]:
    with serve_ready(letters_dir, "--served-model-name", NAME, "--served-model-name", "alias") as served:
        yield served


@pytest.fixture
def client(served: ServedModel) -> openai.OpenAI:
    return served.openai


@asynccontextmanager
async def async_client(served: ServedModel) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def middle_of(answer: ChatCompletion) -> str:
    """A stop string that ends the same answer: the stream helper raises at one that its length ended."""
    content = answer.choices[0].message.content or ""
    return content[len(content) // 2 :][:2]


def test_models_are_listed_and_retrieved_by_names_with_slashes(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert [model.id for model in models] == [NAME, "alias"]
    for name in (NAME, "alias"):
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some-org/other")
    assert caught.value.code == "model_not_found"


def test_chat_and_its_stream_give_one_text_and_one_usage(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "messages": USER, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.model == chunks[0].model == NAME


def test_completions_and_their_stream_give_one_text(client: openai.OpenAI) -> None:
    options: Any = {"model": "alias", "prompt": ["one", "two"], "max_tokens": 9, "temperature": 0, "n": 2}
    whole = client.completions.create(**options)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_stream_helper_gives_events_and_the_final_completion(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "messages": USER, "max_tokens": 8, "temperature": 0}
    options["stop"] = middle_of(client.chat.completions.create(**options))
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] in ("content.done", "chunk")
    whole = client.chat.completions.create(**options)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=NAME, messages=USER, response_format=Answer, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_forced_call_has_valid_arguments_in_both_modes(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "messages": USER, "tools": [TOOL], "tool_choice": "required"}
    options |= {"max_tokens": 400, "temperature": 0, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**options)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "look_up"
    assert set(pydantic.TypeAdapter(dict[str, str]).validate_json(call.function.arguments)) == {"word"}
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_logprobs_have_the_shape_of_each_api(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert len(entries) == 4
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.logprob <= 0
    text = client.completions.create(model=NAME, prompt="ab", max_tokens=0, echo=True, logprobs=1)
    columns = text.choices[0].logprobs
    assert columns is not None and columns.token_logprobs is not None
    assert text.choices[0].text == "ab" and len(columns.token_logprobs) == 2
    assert text.usage is not None and text.usage.completion_tokens == 0


def test_raw_response_has_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=NAME, messages=USER, max_tokens=2, extra_headers={"x-request-id": "my-request-1"}
    )
    assert raw.headers["x-request-id"] == "my-request-1"
    assert raw.parse().choices[0].message.role == "assistant"


def test_wrong_value_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=USER, temperature=3.5, stream=True)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"


def test_asynchronous_client_runs_many_at_once_with_equal_texts(served: ServedModel) -> None:
    async def ask() -> None:
        async with async_client(served) as client:
            options: Any = {"model": NAME, "messages": USER, "max_tokens": 8, "temperature": 1.0, "seed": 5}

            async def streamed() -> str:
                stream = await client.chat.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole = await client.chat.completions.create(**options)
            assert set(await asyncio.gather(*[streamed() for _ in range(8)])) == {
                whole.choices[0].message.content
            }
            text = await client.completions.create(model=NAME, prompt="x", max_tokens=3)
            assert text.choices[0].finish_reason in ("length", "stop")
            assert (await client.models.retrieve(NAME)).id == NAME
            assert [model.id async for model in client.models.list()] == [NAME, "alias"]
            options["stop"] = middle_of(whole)
            async with client.chat.completions.stream(**options) as stream:
                final = await stream.get_final_completion()
            content = whole.choices[0].message.content or ""
            assert final.choices[0].message.content == content.partition(options["stop"])[0]

    asyncio.run(ask())
