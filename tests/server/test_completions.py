"""/v1/completions: what is generated, how it ends, and what it counts."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, serving
from support.text_doubles import BOS, EOS, SPECIAL


def test_official_client_gets_a_text_completion() -> None:
    with serving() as world:
        answer = world.openai.completions.create(model=MODEL, prompt="hello", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].text == "hellohe"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        6,
        7,
        13,
    )


def test_max_tokens_is_16_by_default() -> None:
    with serving() as world:
        assert world.complete()["usage"]["completion_tokens"] == 16


def test_max_tokens_is_cut_to_the_room_in_the_context() -> None:
    with serving() as world:
        answer = world.complete(prompt=[65] * 2040, max_tokens=100)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    with serving() as world:
        answer = world.complete(max_tokens=9, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_token_ids_are_taken_as_they_are_without_bos() -> None:
    with serving() as world:
        world.complete(prompt=[72, 105], max_tokens=1)
        world.complete(prompt=[[72], [105, 33]], max_tokens=1)
        assert [submit.token_ids.tolist() for submit in world.engine.submits] == [[72, 105], [72], [105, 33]]


def test_text_gets_bos_unless_the_request_says_otherwise() -> None:
    with serving() as world:
        world.complete(prompt="A", max_tokens=1)
        world.complete(prompt="A", max_tokens=1, add_special_tokens=False)
        assert [submit.token_ids.tolist() for submit in world.engine.submits] == [[BOS, 65], [65]]


def test_empty_text_is_served_because_bos_makes_it_a_prompt() -> None:
    with serving(FakeEngine(reply=says("x"))) as world:
        assert world.complete(prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1
        assert (
            "no tokens"
            in world.refused("/v1/completions", {"prompt": "", "add_special_tokens": False})["message"]
        )


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    with serving() as world:
        answer = world.complete(prompt=["abc", "xyz"], n=2, max_tokens=3)
        submits = world.engine.submits
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "abc"),
        (1, "abc"),
        (2, "xyz"),
        (3, "xyz"),
    ]
    assert [submit.choice for submit in submits] == [0, 1, 0, 1]
    assert len({submit.uid for submit in submits}) == 4
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 12


def test_seed_reaches_every_choice_and_zero_is_a_seed() -> None:
    with serving() as world:
        world.complete(seed=0, n=2, max_tokens=1)
        world.complete(seed=-(2**63), max_tokens=1)
        assert [submit.params.seed for submit in world.engine.submits] == [0, 0, -(2**63)]


def test_seeds_are_drawn_at_random_when_absent() -> None:
    with serving() as world:
        for _ in range(3):
            world.complete(max_tokens=1)
        assert len({submit.params.seed for submit in world.engine.submits}) == 3


def test_sampling_fields_reach_the_engine() -> None:
    with serving() as world:
        world.complete(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, max_tokens=3, stop_token_ids=[7])
        world.complete(top_k=-1, temperature=0, ignore_eos=True, max_tokens=1)
        first, second = (submit.params for submit in world.engine.submits)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 40, 0.1)
    assert (first.max_tokens, first.stop_token_ids) == (3, frozenset({7, EOS}))
    assert (second.top_k, second.temperature, second.stop_token_ids) == (0, 0.0, frozenset[int]())


def test_end_of_text_stays_out_of_the_text_and_counts() -> None:
    with serving(FakeEngine(reply=says("bye", EOS))) as world:
        answer = world.complete()
    assert answer["choices"][0]["text"] == "bye"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 4


def test_ignore_eos_runs_to_max_tokens() -> None:
    with serving(FakeEngine(reply=says("bye", EOS))) as world:
        answer = world.complete(ignore_eos=True, max_tokens=8)
    assert answer["choices"][0]["text"] == "bye...."
    assert answer["usage"]["completion_tokens"] == 8


def test_own_stop_token_is_reported() -> None:
    with serving(FakeEngine(reply=says("ab!c"))) as world:
        choice = world.complete(stop_token_ids=[ord("!")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 33)


@pytest.mark.parametrize("steps_per_turn", [1, 9])
def test_stop_string_cuts_the_text_and_gives_the_sequence_up(steps_per_turn: int) -> None:
    # The stop spans two tokens; tokens after its last one are neither shown nor counted.
    with serving(FakeEngine(reply=says("one\n\ntwo"), steps_per_turn=steps_per_turn)) as world:
        answer = world.complete(stop=["nothing", "\n\n"], max_tokens=50)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", "\n\n")
        assert answer["usage"]["completion_tokens"] == 5
        world.engine.until(lambda: world.engine.aborts == [world.engine.submits[0].uid])


def test_include_stop_str_in_output_keeps_the_stop() -> None:
    with serving(FakeEngine(reply=says("one#two"))) as world:
        assert world.complete(stop="#", include_stop_str_in_output=True)["choices"][0]["text"] == "one#"


def test_stop_is_never_matched_across_the_edge_of_the_prompt() -> None:
    with serving(FakeEngine(reply=says("bcd"))) as world:
        assert world.complete(prompt="a", stop="ab", max_tokens=3)["choices"][0]["text"] == "bcd"


def test_text_held_back_for_a_stop_is_given_at_a_length_end() -> None:
    with serving(FakeEngine(reply=says("abcSTO"))) as world:
        choice = world.complete(stop="STOP", max_tokens=6)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcSTO", "length")


def test_special_tokens_are_shown_on_request_only() -> None:
    with serving(FakeEngine(reply=says("a", SPECIAL))) as world:
        assert world.complete(max_tokens=2)["choices"][0]["text"] == "a"
        assert world.complete(max_tokens=2, skip_special_tokens=False)["choices"][0]["text"] == "a<special>"


def test_output_that_ends_inside_a_character_gets_one_replacement_character() -> None:
    with serving(FakeEngine(reply=says("aé".encode()[:2]))) as world:
        assert world.complete(max_tokens=2)["choices"][0]["text"] == "a\ufffd"


def test_cached_tokens_are_reported_once_per_prompt() -> None:
    with serving(FakeEngine(cached_tokens=4)) as world:
        usage = world.complete(prompt=["abcdef", "ghijkl"], n=3, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == 14
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8, "rebuilt_tokens": 0}


def test_cache_salt_becomes_a_tagged_namespace() -> None:
    with serving() as world:
        world.complete(cache_salt="tenant", max_tokens=1)
        world.complete(max_tokens=1)
        assert [submit.namespace for submit in world.engine.submits] == ["salt:tenant", ""]


def test_unknown_and_neutral_fields_are_ignored() -> None:
    with serving() as world:
        world.complete(
            max_tokens=1, user="me", metadata={"a": 1}, brand_new=[1], logprobs=None, echo=False, best_of=1,
            presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias={}, suffix=None,
            response_format={"type": "text"}, min_tokens=0, store=True,
        )  # fmt: skip


def test_model_may_be_an_alias_or_absent() -> None:
    with serving() as world:
        assert world.complete(model="alias", max_tokens=1)["model"] == "alias"
        assert world.complete(max_tokens=1)["model"] == MODEL
