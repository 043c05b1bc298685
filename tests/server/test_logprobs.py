"""Log-probabilities, echo and scoring over HTTP: the shapes of both APIs, and whose tokens they show."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, says
from support.http_server import World, events_of, serving
from support.text_doubles import BOS, EOS, SPECIAL

SNOWMAN = "☃".encode()


def test_chat_has_one_entry_for_each_token_with_exact_bytes() -> None:
    with serving(FakeEngine(reply=says("a☃b", EOS))) as world:
        choice = world.chat(logprobs=True, top_logprobs=2)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "a☃b"
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "a☃b".encode()
    assert [entry["token"] for entry in entries] == ["a", "�", "�", "�", "b"]
    assert [entry["logprob"] for entry in entries] == [-byte / 256 for byte in "a☃b".encode()]
    first = entries[0]["top_logprobs"]
    assert [(top["token"], top["logprob"], top["bytes"]) for top in first] == [
        ("a", 0.0, [97]),
        ("b", -9999.0, [98]),
    ]


@pytest.mark.parametrize("num_top", [None, 0])
def test_chat_without_top_logprobs_has_empty_lists(num_top: int | None) -> None:
    with serving(FakeEngine(reply=says("ab", EOS))) as world:
        entries = world.chat(logprobs=True, top_logprobs=num_top)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]


def test_minus_infinity_is_a_number() -> None:
    with serving(FakeEngine(reply=says(b"\0", EOS))) as world:
        chat = world.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
        legacy = world.complete(logprobs=1)["choices"][0]["logprobs"]
    assert chat[0]["logprob"] == -9999.0
    assert legacy["token_logprobs"] == [-9999.0]


def test_logprobs_are_null_unless_asked_for() -> None:
    with serving(FakeEngine(reply=says("ab", EOS))) as world:
        assert world.chat(logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None
        assert world.complete(logprobs=False)["choices"][0]["logprobs"] is None


def test_completions_have_the_legacy_columns() -> None:
    with serving(FakeEngine(reply=says("a☃", EOS))) as world:
        logprobs = world.complete(logprobs=2)["choices"][0]["logprobs"]
    parts = ["bytes:" + "".join(f"\\x{byte:02x}") for byte in SNOWMAN]
    assert logprobs["tokens"] == ["a", *parts]
    assert logprobs["token_logprobs"] == [-byte / 256 for byte in b"a" + SNOWMAN]
    assert logprobs["text_offset"] == [0, 1, 1, 1]
    assert logprobs["top_logprobs"][0] == {"a": 0.0, "b": -9999.0}


def test_completions_logprobs_0_show_the_sampled_token_alone() -> None:
    with serving(FakeEngine(reply=says("ab", EOS))) as world:
        logprobs = world.complete(logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -97 / 256}, {"b": -98 / 256}]


def test_special_tokens_are_shown_in_logprobs_alone() -> None:
    def reply(_: object) -> Any:
        yield from (ord("a"), SPECIAL, ord("b"), EOS)

    with serving(FakeEngine(reply=reply)) as world:
        choice = world.complete(logprobs=0)["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "<special>", "b"]


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("steps_per_turn", [1, 3, 50])
def test_entries_end_where_the_stop_string_cuts_the_text(includes_stop: bool, steps_per_turn: int) -> None:
    engine = FakeEngine(reply=says("one STOP two"), steps_per_turn=steps_per_turn)
    with serving(engine) as world:
        body = {"stop": "STOP", "include_stop_str_in_output": includes_stop, "logprobs": 0}
        choice = world.complete(**body)["choices"][0]
        streamed = _stream(world, "/v1/completions", {"prompt": "hello", **body})
    assert choice["text"] == ("one STOP" if includes_stop else "one ")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert _joined(streamed) == (choice["text"], choice["logprobs"])


@pytest.mark.parametrize("steps_per_turn", [1, 2, 7])
def test_streamed_entries_equal_the_whole_answers(steps_per_turn: int) -> None:
    engine = FakeEngine(reply=says("x☃y STO", EOS), steps_per_turn=steps_per_turn)
    with serving(engine) as world:
        body = {"prompt": "hello", "logprobs": 3, "stop": ["STOP"], "echo": True}
        whole = world.complete(**body)["choices"][0]
        assert _joined(_stream(world, "/v1/completions", body)) == (whole["text"], whole["logprobs"])
        chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
        entries = [
            entry
            for event in _stream(world, "/v1/chat/completions", chat)
            for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert entries == world.chat(**chat)["choices"][0]["logprobs"]["content"]


def test_echo_puts_the_prompt_before_the_text() -> None:
    with serving(FakeEngine(reply=says("!", EOS))) as world:
        assert world.complete(prompt="hällo", echo=True)["choices"][0]["text"] == "hällo!"
        of_ids = world.complete(prompt=[BOS, 104, 105], echo=True)["choices"][0]
        assert of_ids["text"] == "hi!"
        two = world.complete(prompt=["a", "b"], n=2, echo=True)["choices"]
        assert [choice["text"] for choice in two] == ["a!", "a!", "b!", "b!"]


def test_echo_is_the_first_chunk_of_each_choice() -> None:
    with serving(FakeEngine(reply=says("!", EOS))) as world:
        events = _stream(world, "/v1/completions", {"prompt": ["a", "b"], "echo": True})
    for index, prompt in enumerate(("a", "b")):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert texts == [prompt, "!", ""]


def test_a_stop_string_is_not_looked_for_in_the_echo() -> None:
    with serving(FakeEngine(reply=says("lo and lo", EOS))) as world:
        choice = world.complete(prompt="hello", echo=True, stop=["hello", "ol"])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hellolo and lo", "stop")
    assert choice["stop_reason"] is None


def test_scoring_generates_nothing() -> None:
    prompt = "Your ☃: Yes"
    with serving() as world:
        answer = world.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    num_tokens = answer["usage"]["prompt_tokens"]
    assert choice["text"] == prompt
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"] == [None, *(-byte / 256 for byte in prompt.encode())]
    assert all(len(column) == num_tokens for column in logprobs.values())
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:7] == [0, 0, 1, 2, 3, 4, 5]
    assert logprobs["text_offset"][8:11] == [5, 6, 7]


def test_echo_without_logprobs_and_tokens_gives_the_prompt_back() -> None:
    with serving() as world:
        choice = world.complete(prompt="hi", echo=True, max_tokens=0)["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("hi", None)


def test_echoed_prompt_and_answer_share_the_columns() -> None:
    with serving(FakeEngine(reply=says("cd", EOS))) as world:
        logprobs = world.complete(prompt=[97, 98], echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, *(-byte / 256 for byte in b"bcd")]


def test_max_tokens_0_needs_echo() -> None:
    with serving() as world:
        assert world.refused("/v1/completions", {"prompt": "a", "max_tokens": 0})["param"] == "max_tokens"


def test_only_what_is_asked_for_reaches_the_engine() -> None:
    with serving() as world:
        world.complete(max_tokens=1)
        world.complete(max_tokens=1, logprobs=2)
        world.complete(max_tokens=1, logprobs=2, echo=True)
        world.complete(max_tokens=1, echo=True)
        params = [submit.params for submit in world.engine.submits]
    assert [each.num_logprobs for each in params] == [None, 2, 2, None]
    assert [each.scores_prompt for each in params] == [False, False, True, False]


def test_penalties_and_biases_reach_the_engine() -> None:
    body = {
        "presence_penalty": 1.5,
        "frequency_penalty": -2,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "07": 1.5},
        "min_tokens": 3,
        "max_tokens": 4,
    }
    with serving() as world:
        world.complete(**body)
        world.chat(**body)
        for submit in world.engine.submits:
            params = submit.params
            assert params.presence_penalty == 1.5
            assert params.frequency_penalty == -2.0
            assert params.repetition_penalty == 1.25
            assert params.logit_bias == ((5, -100.0), (7, 1.5))
            assert (params.min_tokens, params.max_tokens) == (3, 4)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("steps_per_turn", [1, 5])
def test_no_stop_string_ends_an_answer_before_min_tokens(is_stream: bool, steps_per_turn: int) -> None:
    engine = FakeEngine(reply=says("abcabcabcabc"), steps_per_turn=steps_per_turn)
    with serving(engine) as world:
        body = {"prompt": "hello", "min_tokens": 5, "max_tokens": 10, "stop": ["a", "bc"]}
        if is_stream:
            text, _ = _joined(_stream(world, "/v1/completions", body))
        else:
            text = world.complete(**body)["choices"][0]["text"]
    # The fifth token is the first whose text may hold a stop string; the match of "bc" begins with it.
    assert text == "abca"


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with serving() as world:
        error = world.refused("/v1/completions", {"prompt": "a", "min_tokens": 5, "max_tokens": 4})
        assert error["param"] == "min_tokens"


def _stream(world: World, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with world.http.stream("POST", path, json={**body, "stream": True}) as response:
        return events_of(response)


def _joined(events: list[dict[str, Any]]) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probability columns of a stream with one choice."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for event in events:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            columns[name] += values
    return "".join(event["choices"][0]["text"] for event in events), columns
