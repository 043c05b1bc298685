"""Requests with grammars, penalties, bias, logprobs and seeds through the real engine, alone and together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from support.model_world import Answer, ModelWorld
from support.tiny_models import one_character_per_token, save_tiny_model

from forkpoint.configs.sampling import SamplingParams

EOS = 1
PROMPT = list(range(10, 60))
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


def grammar_of(schema: Mapping[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def params(seed: int = 0, **fields: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"seed": seed, "max_tokens": 80, "stop_token_ids": frozenset([EOS])}
    return SamplingParams(**(defaults | fields))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), one_character_per_token())


@pytest.fixture(scope="module")
def world(model_dir: Path) -> ModelWorld:
    return ModelWorld(model_dir)


def text_of(answer: Answer) -> str:
    tokenizer = one_character_per_token()
    return "".join(str(tokenizer.id_to_token(token)) for token in answer.tokens if token > 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_choice_matches_the_schema_and_ends_with_stop(world: ModelWorld, temperature: float) -> None:
    answers = [
        world.submit(PROMPT, params(grammar=grammar_of(SCHEMA), temperature=temperature), choice=choice)
        for choice in range(6)
    ]
    world.run()
    texts = [text_of(answer) for answer in answers]
    for answer, text in zip(answers, texts, strict=True):
        value = json.loads(text)
        assert value["name"] in ("red", "green", "blue") and 1 <= len(value["sizes"]) <= 2
        assert answer.reason == "stop"
    assert len(set(texts)) == 1 if temperature == 0.0 else len(set(texts)) > 1


def test_a_complete_grammar_ends_without_an_end_of_text_even_when_that_is_ignored(world: ModelWorld) -> None:
    answer = world.answer(
        PROMPT, params(grammar=LLMatcher.grammar_from_regex("abc"), stop_token_ids=frozenset(), min_tokens=9)
    )
    assert text_of(answer) == "abc" and len(answer.tokens) == 3
    assert answer.finish is not None and (answer.finish.reason, answer.finish.stop_token_id) == ("stop", None)


def test_an_end_of_text_that_a_grammar_allows_ends_the_sequence_even_when_it_is_ignored(
    world: ModelWorld,
) -> None:
    bias = ((EOS, 100.0),)
    fields: dict[str, Any] = {
        "grammar": LLMatcher.grammar_from_regex("a*"),
        "stop_token_ids": frozenset(),
        "logit_bias": bias,
    }
    answer = world.answer(PROMPT, params(**fields))
    assert answer.tokens == [EOS]
    assert answer.finish is not None and answer.finish.stop_token_id == EOS
    later = world.answer(PROMPT, params(**fields, min_tokens=7))
    assert text_of(later) == "a" * 7 and later.tokens[-1] == EOS


def test_length_may_cut_what_a_grammar_has_begun(world: ModelWorld) -> None:
    answer = world.answer(PROMPT, params(grammar=grammar_of(SCHEMA), max_tokens=5))
    assert answer.reason == "length" and text_of(answer) == '{"nam'


def test_constrained_rows_leave_free_ones_alone(world: ModelWorld) -> None:
    free_params = [
        params(seed=7, temperature=t, max_tokens=20, stop_token_ids=frozenset()) for t in (0.0, 1.0)
    ]
    alone = [world.answer(PROMPT[: index + 20], free_params[index]).tokens for index in range(2)]
    constrained = [
        world.submit(PROMPT, params(seed, grammar=grammar_of({"const": f"value {seed % 3}"})))
        for seed in range(9)
    ]
    free = [world.submit(PROMPT[: index + 20], free_params[index]) for index in range(2)]
    world.run()
    assert [answer.tokens for answer in free] == alone
    assert [text_of(answer) for answer in constrained] == [f'"value {seed % 3}"' for seed in range(9)]


@pytest.mark.parametrize("grammar", ["rubbish", LLMatcher.grammar_from_regex("(")])
def test_a_grammar_that_cannot_be_compiled_fails_its_sequence_alone(world: ModelWorld, grammar: str) -> None:
    bad = world.submit(PROMPT, params(grammar=grammar))
    good = world.submit(PROMPT, params(grammar=grammar_of(SCHEMA)))
    world.run()
    assert bad.finish is not None and bad.finish.reason == "error" and bad.tokens == []
    assert "cannot be compiled" in str(bad.finish.message) and bad.finish.is_own_fault
    assert good.reason == "stop"


def test_a_grammar_that_passes_a_limit_on_its_way_fails_its_sequence_alone(world: ModelWorld) -> None:
    # Nothing spells this letter: the library finds out only when it is reached.
    bad = world.submit(PROMPT, params(grammar=LLMatcher.grammar_from_regex("abé")))
    good = world.submit(PROMPT, params(grammar=grammar_of(SCHEMA)))
    world.run()
    assert bad.finish is not None and bad.finish.reason == "error" and bad.finish.is_own_fault
    assert good.reason == "stop"


def test_a_model_without_a_tokenizer_refuses_grammars_and_serves_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = save_tiny_model(tmp_path_factory.mktemp("bare"), one_character_per_token())
    (directory / "tokenizer.json").unlink()
    world = ModelWorld(directory)
    refused = world.submit(PROMPT, params(grammar=grammar_of(SCHEMA)))
    served = world.answer(PROMPT, params(max_tokens=3, stop_token_ids=frozenset()))
    assert refused.reason == "error" and "no tokenizer" in str(refused.finish)
    assert len(served.tokens) == 3


def test_an_abort_while_a_grammar_is_compiled_or_followed_ends_it(world: ModelWorld) -> None:
    first = world.submit(PROMPT, params(grammar=grammar_of({"type": "array", "items": {"const": 11}})))
    world.abort(first)
    second = world.submit(PROMPT, params(grammar=grammar_of(SCHEMA)))
    while not second.tokens:
        world.step()
    world.abort(second)
    world.run()
    assert (first.reason, second.reason) == ("abort", "abort")


def test_a_retracted_sequence_goes_on_in_its_grammar(model_dir: Path) -> None:
    def run(full_tokens: int) -> tuple[list[str], int]:
        world = ModelWorld(model_dir, chunk=32, full_tokens=full_tokens)
        pattern = LLMatcher.grammar_from_regex("([a-z][0-9]){60}")
        fields: dict[str, Any] = {
            "grammar": pattern,
            "max_tokens": 150,
            "temperature": 1.0,
            "repetition_penalty": 1.2,
        }
        answers = [world.submit(PROMPT[: 30 + seed], params(seed, **fields)) for seed in range(4)]
        world.run()
        assert all(answer.reason == "stop" for answer in answers)
        return [text_of(answer) for answer in answers], world.engine.stats().retractions

    roomy, _ = run(4096)
    tight, num_retractions = run(320)
    assert num_retractions > 0
    assert tight == roomy
    assert all(re.fullmatch("([a-z][0-9]){60}", text) for text in roomy)


def test_min_tokens_keeps_every_stop_token_back(world: ModelWorld) -> None:
    stop = frozenset(range(0, 320, 2))
    bias = tuple((token, 100.0) for token in stop)
    at_once = world.answer(PROMPT, params(stop_token_ids=stop, logit_bias=bias, max_tokens=30))
    later = world.answer(PROMPT, params(stop_token_ids=stop, logit_bias=bias, max_tokens=30, min_tokens=12))
    assert len(at_once.tokens) == 1
    assert len(later.tokens) == 13 and not stop & set(later.tokens[:-1]) and later.tokens[-1] in stop


def test_penalties_count_what_was_generated_and_not_the_prompt(world: ModelWorld) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "stop_token_ids": frozenset()}
    bias = tuple((token, 30.0) for token in PROMPT[:40])
    plain = world.answer(PROMPT, params(**fields, logit_bias=bias))
    # 30 lifts 40 tokens of the prompt above all others: each is used up once before any comes again.
    spread = world.answer(
        PROMPT, params(**fields, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)
    )
    assert set(spread.tokens) <= set(PROMPT[:40])
    assert len(set(spread.tokens)) > len(set(plain.tokens))
    unseen = world.answer(PROMPT, params(**fields, repetition_penalty=1e30))
    assert not set(unseen.tokens) & set(PROMPT) and len(set(unseen.tokens)) == 40


SEEDED: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    "logprobs": {"num_logprobs": 5},
    "filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "logit_bias": ((20, 3.0),)},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": frozenset(range(100, 200))},
    "scored": {"scores_prompt": True, "num_logprobs": 2},
    "grammar": {"grammar": LLMatcher.grammar_from_regex("[a-z]{3,}[0-9]+[a-z]*")},
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_text_does_not_change_beside_neighbours(world: ModelWorld, name: str) -> None:
    defaults: dict[str, Any] = {"max_tokens": 10, "stop_token_ids": frozenset()}
    own = params(42, **(defaults | SEEDED[name]))
    alone = world.answer(PROMPT, own)
    for seed, other in enumerate(SEEDED):
        world.submit(PROMPT[: 10 + seed], params(seed, **SEEDED[other]))
    world.step()
    together = world.answer(PROMPT, own)
    assert together.tokens == alone.tokens
    other_choice = world.answer(PROMPT, own, choice=1)
    assert other_choice.tokens != alone.tokens
    assert len(alone.logprobs) == (len(alone.tokens) if own.num_logprobs is not None else 0)
