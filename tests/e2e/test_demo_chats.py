"""The demo model's chats that share a system prompt: it is computed once, whoever asks and when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.served import ServedModel, serve_ready

# Longer than the demo's window of 512, so a missing window would have to be rebuilt.
SYSTEM = "You are a careful clerk. " + " ".join(
    f"Rule {number}: never write the number {37 * number} on page {number}." for number in range(40)
)
NUM_TOGETHER = 8
MAX_ANSWER_S = 300.0
PAGE_SIZE = 16


def test_a_shared_system_prompt_is_computed_once_and_its_window_is_there() -> None:
    with serve_ready("demo", "--page-size", str(PAGE_SIZE)) as served:
        first = usage_of(served, "What is on page three?")
        assert first["prompt_tokens"] > 512
        assert first["prompt_tokens_details"] == {"cached_tokens": 0, "rebuilt_tokens": 0}
        own_tokens = 60  # a question, its turn and the header of the answer have fewer
        assert_shares(usage_of(served, "Who wrote the letters?"), own_tokens)
        again = usage_of(served, "What is on page three?")
        assert_shares(again, PAGE_SIZE)
        served.flush()
        with ThreadPoolExecutor(NUM_TOGETHER) as pool:
            questions = [f"{number}: who wrote the letters?" for number in range(NUM_TOGETHER)]
            usages = list(pool.map(lambda question: usage_of(served, question), questions))
        computing = [usage for usage in usages if usage["prompt_tokens_details"]["cached_tokens"] == 0]
        assert len(computing) == 1, usages
        for usage in usages:
            if usage is not computing[0]:
                assert_shares(usage, own_tokens)
        served.flush()


def usage_of(served: ServedModel, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    response = served.http.post("/v1/chat/completions", json=body, timeout=MAX_ANSWER_S)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def assert_shares(usage: dict[str, Any], own_tokens: int) -> None:
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] >= usage["prompt_tokens"] - own_tokens, usage
    assert details["rebuilt_tokens"] == 0, usage
