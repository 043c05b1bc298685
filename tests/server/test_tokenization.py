"""/tokenize and /detokenize: counts that equal usage, bounds, the key, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_engine import INFO
from support.http_server import MODEL, World, error_of, serving
from support.text_doubles import BOS, EOS, VOCAB_SIZE

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CHAT = [{"role": "system", "content": "short"}, {"role": "user", "content": "an émigré 🦊"}]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving() as world:
        yield world


def post(world: World, path: str, **body: Any) -> dict[str, Any]:
    response = world.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_prompt_gives_its_ids_and_the_context_length(world: World, prefix: str) -> None:
    assert post(world, f"{prefix}/tokenize", model=MODEL, prompt="hé") == {
        "tokens": [BOS, *"hé".encode()],
        "count": 4,
        "max_model_len": INFO.context_length,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_count_of_a_chat_is_the_usage_of_the_same_request(world: World, options: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": CHAT, **options}
    usage = world.chat(**body, max_tokens=1)["usage"]
    assert post(world, "/tokenize", **body)["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}])
def test_count_of_a_prompt_is_the_usage_of_the_same_request(world: World, options: dict[str, Any]) -> None:
    usage = world.complete(prompt="some text", max_tokens=1, **options)["usage"]
    assert post(world, "/tokenize", prompt="some text", **options)["count"] == usage["prompt_tokens"]


def test_text_of_more_tokens_than_the_context_is_counted(world: World) -> None:
    text = "é" * (INFO.context_length - 10)
    assert post(world, "/tokenize", prompt=text, add_special_tokens=False)["count"] == 2 * len(text)


def test_ids_come_back_as_the_text_with_its_special_tokens(world: World) -> None:
    tokens = post(world, "/tokenize", prompt="hé 🦊", add_special_tokens=False)["tokens"]
    assert post(world, "/detokenize", tokens=tokens) == {"prompt": "hé 🦊", "text": "hé 🦊"}
    assert post(world, "/v1/detokenize", tokens=[104, EOS])["text"] == "h<special>"
    assert post(world, "/detokenize", tokens=[])["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages.0.role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
    ],
)
def test_wrong_field_is_a_400_that_names_it(
    world: World, path: str, body: dict[str, Any], param: str
) -> None:
    assert world.refused(path, body)["param"] == param


def test_unknown_model_is_a_404(world: World) -> None:
    for path in ("/tokenize", "/detokenize"):
        body = {"model": "nobody", "prompt": "a", "tokens": []}
        assert world.refused(path, body, 404)["code"] == "model_not_found"


def test_text_that_cannot_fit_whatever_its_tokens_is_refused_before_it_is_encoded(world: World) -> None:
    num_encoded = world.tokenizer.num_encoded
    text = "a" * (INFO.context_length + 1)
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        assert world.refused("/tokenize", body)["code"] == "context_length_exceeded"
    many = [{"role": "user", "content": ""}] * (INFO.context_length + 1)
    assert world.refused("/tokenize", {"messages": many})["code"] == "context_length_exceeded"
    assert world.tokenizer.num_encoded == num_encoded


def test_chat_without_a_template_is_a_400() -> None:
    with serving(has_template=False) as world:
        assert "--chat-template" in world.refused("/tokenize", {"messages": CHAT})["message"]


def test_both_are_guarded_by_the_key() -> None:
    with serving(api_keys=("secret",)) as world:
        for path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"):
            error_of(world.http.post(path, json={"prompt": "a", "tokens": []}), 401)
            headers = {"authorization": "Bearer secret"}
            assert world.http.post(path, json={"prompt": "a", "tokens": []}, headers=headers).is_success
