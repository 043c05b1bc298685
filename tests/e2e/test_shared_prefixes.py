"""Many requests that fork off each other, in pools too small for them, answer as without any cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.http_server import raw_request, read_until
from support.near_ties import differ_beyond_ties
from support.served import ServedModel, serve_ready
from support.tiny_models import NUM_SPECIAL, VOCAB_SIZE

from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.text import Tokenizer

NUM_REQUESTS = 120
NUM_AT_A_TIME = 8
MAX_PROMPT = 300
# Room for two of the longest requests while eight run, so full pages run out while they decode; and room
# for eight windows, so that none of the many kept ones is safe.
FULL_SLOTS = 768
SWA_SLOTS = 640
CHUNK = 48


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request. token_ids: what the model gets to see. is_noise: its client leaves early."""

    path: str
    body: dict[str, Any]
    token_ids: tuple[int, ...]
    is_noise: bool


@pytest.fixture(scope="module")
def requests(letters_dir: Path) -> list[Request]:
    return list(forking_requests(letters_dir, random.Random(20)))


@pytest.fixture(scope="module")
def plain_texts(letters_dir: Path, requests: list[Request]) -> list[str | None]:
    """The answers of a server that shares nothing and has room for everything."""
    with serve_ready(letters_dir, "--disable-radix-cache", "--page-size", "16") as served:
        texts = texts_of(served, requests)
        metrics = served.metrics()
        assert metrics["forkpoint_cached_tokens_total"] == 0
        assert metrics["forkpoint_retractions_total"] == 0
        served.flush()
    return texts


@pytest.mark.parametrize("page_size", [1, 16])
def test_forking_requests_in_tight_pools_answer_as_without_a_cache(
    letters_dir: Path, requests: list[Request], plain_texts: list[str | None], page_size: int
) -> None:
    flags = {
        "--page-size": page_size,
        "--max-total-tokens": FULL_SLOTS,
        "--swa-total-tokens": SWA_SLOTS,
        "--chunked-prefill-size": CHUNK,
    }
    with serve_ready(letters_dir, *(str(part) for flag in flags.items() for part in flag)) as served:
        texts = texts_of(served, requests)
        served.wait_idle()
        metrics = served.metrics()
        for counter in (
            "retractions_total",
            'evicted_slots_total{kind="full"}',
            'evicted_slots_total{kind="swa"}',
            'branch_points_total{event="kept"}',
            "cached_tokens_total",
        ):
            assert metrics[f"forkpoint_{counter}"] > 0, counter
        parts = [metrics[f"forkpoint_{part}_tokens_total"] for part in ("cached", "rebuilt", "computed")]
        assert sum(parts) == metrics["forkpoint_prompt_tokens_total"]
        served.flush()
        assert served.pool("full")["free"] == FULL_SLOTS
        assert served.pool("swa")["free"] == SWA_SLOTS
    tokenizer = Tokenizer.load(letters_dir)
    num_ties = 0
    for request, text, plain_text in zip(requests, texts, plain_texts, strict=True):
        if text != plain_text:
            assert text is not None and plain_text is not None
            outputs = (tokenizer.encode(each).tolist() for each in (text, plain_text))
            assert not differ_beyond_ties(letters_dir, request.token_ids, *outputs), request
            num_ties += 1
    # Were ties common, "equal but for ties" would say little.
    assert num_ties <= 2, f"{num_ties} of {NUM_REQUESTS} outputs part at a tie"


def forking_requests(model_dir: Path, rng: random.Random) -> Iterator[Request]:
    """Prompts that leave earlier ones at random places, conversations that go on, and clients that leave."""
    template, tokenizer = ChatTemplate.load(model_dir, None), Tokenizer.load(model_dir)
    assert template is not None
    prompts: list[list[int]] = [[]]
    conversations: list[list[dict[str, str]]] = [[{"role": "system", "content": letters(rng, 90)}]]
    for _ in range(NUM_REQUESTS):
        # It takes long answers to run out of pages while decoding.
        max_tokens = rng.choice([1, 4, 8, 16, 90, 150])
        body = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "skip_special_tokens": False}
        is_noise = rng.random() < 0.25
        if rng.random() < 0.25:
            messages = [*rng.choice(conversations), {"role": "user", "content": letters(rng, 25)}]
            if len(messages) < 6:
                answer = {"role": "assistant", "content": letters(rng, 20)}
                conversations.append([*messages, answer])
            ids = tokenizer.encode(template.render(messages)).tolist()
            yield Request("/v1/chat/completions", {**body, "messages": messages}, tuple(ids), is_noise)
        else:
            origin = rng.choice(prompts)
            prompt = origin[: rng.randint(0, len(origin))]
            prompt += [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(rng.randint(1, 90))]
            prompt = prompt[:MAX_PROMPT]
            prompts.append(prompt)
            yield Request("/v1/completions", {**body, "prompt": prompt}, tuple(prompt), is_noise)


def letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abcdefghij ") for _ in range(length))


def texts_of(served: ServedModel, requests: list[Request]) -> list[str | None]:
    """Send all, NUM_AT_A_TIME at a time. None: of a client that did not wait for its answer."""

    def ask(request: Request) -> str | None:
        if request.is_noise:
            leave_early(served, request)
            return None
        response = served.http.post(request.path, json=request.body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        return list(pool.map(ask, requests))


def leave_early(served: ServedModel, request: Request) -> None:
    """Ask for a long answer and go: at once, or when the stream has begun."""
    is_stream = len(request.token_ids) % 2 == 0
    body = {**request.body, "max_tokens": 200, "stream": is_stream}
    with raw_request(served.url, request.path, body) as connection:
        if is_stream:
            read_until(connection, b"data: ")
