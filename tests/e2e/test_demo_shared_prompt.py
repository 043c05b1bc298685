"""The demo model under requests that share a system prompt: cached, and word for word as without a cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai.types import Completion
from support.served import ServedModel, serve_ready

GOLDENS = Path(__file__).parent.parent / "demo" / "demo_goldens.json"
SYSTEM_LEN = 2048
NUM_REQUESTS = 24
NUM_ALONE = 2
NUM_AT_A_TIME = 4
NUM_NEW_TOKENS = 12
# Four prompts of 2,090 tokens that nothing is cached of take 20 s on two idle cores.
MAX_ANSWER_S = 300.0


def test_later_requests_reuse_the_shared_prompt_and_answer_as_without_a_cache() -> None:
    """Two requests one after the other, then 22 more, four at a time.

    The second request finds full KV only, and makes the branch point at which all later ones resume.
    """
    prompts = prompts_with_one_system_prompt()
    with serve_ready("demo") as served:
        answers = answers_of(served, prompts)
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert cached[0] == 0
        assert min(cached[NUM_ALONE:]) >= 0.95 * SYSTEM_LEN, cached
        served.flush()
    with serve_ready("demo", "--disable-radix-cache") as served:
        plain_answers = answers_of(served, prompts)
        assert {answer.usage.prompt_tokens_details.cached_tokens for answer in plain_answers} == {0}
        served.flush()
    assert [text_of(answer) for answer in answers] == [text_of(answer) for answer in plain_answers]
    assert len({text_of(answer) for answer in answers}) > NUM_REQUESTS / 2, "the questions matter"


def prompts_with_one_system_prompt() -> list[list[int]]:
    """Token ids of real text: the goldens' prompts, cut into one beginning and different ends of it."""
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))["prompts"]
    token_ids: list[int] = [token for golden in reversed(goldens) for token in golden["prompt_ids"]]
    system, rest = token_ids[:SYSTEM_LEN], token_ids[SYSTEM_LEN:]
    # Stride 67 gives every question another first token, so none shares a page of its own with another.
    questions = [rest[67 * index : 67 * index + 20 + index] for index in range(NUM_REQUESTS)]
    assert all(len(question) == 20 + index for index, question in enumerate(questions))
    return [[*system, *question] for question in questions]


def answers_of(served: ServedModel, prompts: list[list[int]]) -> list[Any]:
    def ask(prompt: list[int]) -> Completion:
        return served.openai.completions.create(
            model="demo",
            prompt=prompt,
            temperature=0,
            max_tokens=NUM_NEW_TOKENS,
            extra_body={"ignore_eos": True},
            timeout=MAX_ANSWER_S,
        )

    alone = [ask(prompt) for prompt in prompts[:NUM_ALONE]]
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        return [*alone, *pool.map(ask, prompts[NUM_ALONE:])]


def text_of(answer: Completion) -> str:
    return answer.choices[0].text
