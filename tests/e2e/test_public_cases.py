"""Faults that other servers had, as their public reports tell: the smallest input of each, and what is right.

The name of each test is the kind of fault. Those of the cache have their traces in tests/cache
(A13, A14, C7, C9 of the list that this file follows); here is what they look like from outside.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from support.served import ServedModel, pool_of, wait_until

ANIMALS = "Here is a list of animals: dog, cat,"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def server(fragments: ServedModel) -> Iterator[ServedModel]:
    """The shared server; after each fault it must answer a normal request."""
    yield fragments
    assert fragments.text("still there?", max_tokens=1) is not None
    assert fragments.http.get("/health").status_code == 200


def post(server: ServedModel, path: str, body: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.http.post(path, content=content, headers={"content-type": "application/json"})


def refused(server: ServedModel, path: str, body: Any) -> dict[str, Any]:
    """The error of a request that must get a 400 with the whole envelope."""
    response = post(server, path, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def chat_body(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **options}


def streamed_text(server: ServedModel, **body: Any) -> tuple[str, str | None]:
    stream = server.openai.completions.create(model=server.model, stream=True, **body)
    chunks = [chunk.choices[0] for chunk in stream]
    return "".join(choice.text for choice in chunks), chunks[-1].finish_reason


def test_stream_holds_back_the_beginning_of_a_stop_string(server: ServedModel) -> None:
    """A1: sgl-project/sglang #11462."""
    text = server.text(ANIMALS, max_tokens=32, ignore_eos=True)
    stop = text[len(text) // 2 : len(text) // 2 + 9]
    options: dict[str, Any] = {"prompt": ANIMALS, "max_tokens": 32, "temperature": 0, "stop": [stop]}
    streamed = streamed_text(server, **options, extra_body={"ignore_eos": True})
    assert streamed == (text[: text.index(stop)], "stop")


def test_stop_string_need_not_begin_or_end_with_a_token(server: ServedModel) -> None:
    """A2: InternLM/lmdeploy #1731."""
    text = server.text(ANIMALS, max_tokens=32, ignore_eos=True)
    for start in range(1, 8):
        stop = text[start : start + 3]
        choice = server.complete(ANIMALS, max_tokens=32, ignore_eos=True, stop=stop)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_streaming_request_with_a_wrong_field_is_a_400_and_the_end(server: ServedModel) -> None:
    """A3: EricLBuehler/mistral.rs #1874."""
    refused(server, CHAT, chat_body(n=0, stream=True))


def test_usage_of_a_stream_is_the_sum_of_its_choices(server: ServedModel) -> None:
    """A4: vllm-project/vllm #9475."""
    body = {
        "prompt": "Write:", "n": 3, "max_tokens": 4, "temperature": 1, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    events = [line[6:] for line in post(server, COMPLETIONS, body).text.splitlines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == server.complete("Write:", max_tokens=1)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_number_that_is_not_finite_is_a_400(server: ServedModel, field: str, value: str) -> None:
    """A5: sgl-project/sglang #28153."""
    body = json.dumps(chat_body()).removesuffix("}") + f', "{field}": {value}}}'
    refused(server, CHAT, body.encode())


@pytest.mark.parametrize("token_id", ["999999999", "-1", "320"])
def test_bias_of_a_token_that_does_not_exist_is_a_400(server: ServedModel, token_id: str) -> None:
    """A6: vllm-project/vllm #16529."""
    error = refused(server, CHAT, chat_body(logit_bias={token_id: 5}))
    assert token_id in error["message"]


def test_scoring_without_generating(server: ServedModel) -> None:
    """A7: vllm-project/vllm #6521; twice, so that the second finds a warm cache."""
    prompt = "Your answer: Yes"
    answers = [server.complete(prompt, echo=True, max_tokens=0, logprobs=1) for _ in range(2)]
    for answer in answers:
        choice = answer["choices"][0]
        values = choice["logprobs"]["token_logprobs"]
        assert choice["text"] == prompt
        assert len(values) == answer["usage"]["prompt_tokens"]
        assert values[0] is None
        assert all(value <= 0 for value in values[1:])
        assert answer["usage"]["completion_tokens"] == 0
    cold, warm = (answer["choices"][0]["logprobs"]["token_logprobs"][1:] for answer in answers)
    assert warm == pytest.approx(cold, abs=1e-4)


def test_schema_that_is_no_schema_is_a_400(server: ServedModel) -> None:
    """A8: vllm-project/vllm #17248."""
    schema = {"type": "object", "properties": {"foo": "bar"}, "required": ["foo"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    refused(server, CHAT, chat_body(response_format=response_format))


def test_error_reaches_the_official_client(server: ServedModel) -> None:
    """A9: sgl-project/sglang #33504."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    body = caught.value.body
    assert isinstance(body, dict) and body["message"] and body["type"] == "invalid_request_error"
    assert "code" in body
    # The client takes a flat object for the error too; others do not.
    assert caught.value.response.json() == {"error": body}


def test_every_text_part_reaches_the_prompt(server: ServedModel) -> None:
    """A10: Blaizzy/mlx-vlm #1137."""

    def num_prompt_tokens(*texts: str) -> int:
        parts = [{"type": "text", "text": text} for text in texts]
        body = chat_body(messages=[{"role": "user", "content": parts}], max_tokens=1)
        return int(post(server, CHAT, body).json()["usage"]["prompt_tokens"])

    alone = num_prompt_tokens("Name a colour.")
    assert num_prompt_tokens(" ".join(["word"] * 40), "Name a colour.") >= alone + 40


def test_client_that_leaves_a_whole_answer_stops_its_generation(server: ServedModel) -> None:
    """A11: BerriAI/litellm #37140."""
    body = json.dumps({"prompt": "story", "max_tokens": 3000, "ignore_eos": True}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    address = urlsplit(server.url)
    aborts = 'forkpoint_requests_total{finish_reason="abort"}'
    num_before = server.metrics().get(aborts, 0)
    sockets = [socket.create_connection((address.hostname, address.port)) for _ in range(4)]
    for each in sockets:
        each.sendall(head + body)
    wait_until(lambda: server.metrics()["forkpoint_requests_running"] == 4, lambda: str(server.metrics()))
    for each in sockets:
        each.close()
    wait_until(lambda: server.metrics()["forkpoint_requests_running"] == 0, lambda: str(server.metrics()))
    # Left to themselves they would have ended at 3,000 tokens with reason length.
    assert server.metrics()[aborts] == num_before + 4


def test_seeded_request_is_alone_with_its_seed(server: ServedModel) -> None:
    """A12: vllm-project/vllm #51226."""
    options = {"seed": 42, "temperature": 1, "max_tokens": 30, "ignore_eos": True}
    alone = server.text(ANIMALS, **options)
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(server.text, ANIMALS, temperature=1, max_tokens=40) for _ in range(4)]
        assert pool.submit(server.text, ANIMALS, **options).result() == alone
        assert len({other.result() for other in others}) == 4


def test_pools_return_to_their_first_state(server: ServedModel) -> None:
    """A14: sgl-project/sglang #27789."""
    server.flush()
    before = server.metrics()
    rng = random.Random(14)
    prefix = [rng.randrange(4, 320) for _ in range(200)]

    def request(seed: int) -> None:
        own = random.Random(seed)
        prompt = prefix[: own.randrange(200)] + [own.randrange(4, 320) for _ in range(own.randrange(1, 40))]
        server.complete(prompt, max_tokens=own.randrange(1, 12))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(request, range(200)))
    server.flush()
    after = server.metrics()
    for kind in ("full", "swa"):
        assert pool_of(after, kind) == pool_of(before, kind)


@pytest.mark.parametrize("length", [16, 32, 64])
def test_prompt_that_is_cached_whole(server: ServedModel, length: int) -> None:
    """A15: vllm-project/vllm #3239."""
    prompt = [5 + (index * 7) % 300 for index in range(length)]
    first, second = (server.complete(prompt, max_tokens=8, ignore_eos=True) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached <= length - 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_waits_for_min_tokens(server: ServedModel, is_stream: bool) -> None:
    """C1: vllm-project/vllm #21987."""
    text = server.text(ANIMALS, max_tokens=16, ignore_eos=True)
    body: dict[str, Any] = {
        "prompt": ANIMALS, "max_tokens": 16, "min_tokens": 12, "temperature": 0, "stop": [text[0]],
        "ignore_eos": True, "stream": is_stream,
    }  # fmt: skip
    if is_stream:
        body["stream_options"] = {"include_usage": True}
        usage = json.loads(post(server, COMPLETIONS, body).text.split("data: ")[-2])["usage"]
    else:
        usage = post(server, COMPLETIONS, body).json()["usage"]
    assert 12 <= usage["completion_tokens"] <= 16


@pytest.mark.parametrize("depth", [400, 5_000, 60_000])
def test_deep_schema_is_a_400_at_once(server: ServedModel, depth: int) -> None:
    """C3: ggml-org/llama.cpp #25283 and #26600."""
    schema = '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth
    schemas = '{"type": "json_schema", "json_schema": {"name": "d", "schema": ' + schema + "}}"
    text = json.dumps(chat_body()).removesuffix("}") + f', "response_format": {schemas}}}'
    refused(server, CHAT, text.encode())


def test_deep_nesting_in_an_ignored_field_is_a_400(server: ServedModel) -> None:
    """C3's twin: antirez/ds4 #43."""
    text = json.dumps(chat_body()).removesuffix("}") + ', "unknown": ' + "[" * 60_000 + "]" * 60_000 + "}"
    refused(server, CHAT, text.encode())


def test_prompt_beyond_the_context_is_never_cut(server: ServedModel) -> None:
    """C4: ollama/ollama #4967."""
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    error = refused(server, COMPLETIONS, {"prompt": [5] * (context + 500), "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"
    assert str(context) in error["message"] and str(context + 500) in error["message"]


def test_salt_separates_what_is_cached(server: ServedModel) -> None:
    """C7: vllm-project/vllm #44701."""
    server.flush()
    prompt = list(range(5, 205))

    def num_cached(**options: Any) -> int:
        usage = server.complete(prompt, max_tokens=1, **options)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached(cache_salt="s") == 0
    assert num_cached(cache_salt="s") > 0
    assert num_cached(cache_salt="t") == 0
    assert num_cached() == 0
