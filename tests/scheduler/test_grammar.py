"""Grammars are checked and followed on the detokenizer's bytes, and fail closed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from support.tiny_models import VOCAB_SIZE, bytes_and_pieces, one_character_per_token

from forkpoint.configs.errors import ModelLoadError, RequestError
from forkpoint.scheduler import grammar as grammar_module
from forkpoint.scheduler.constraint import Constraint
from forkpoint.scheduler.grammar import MAX_GRAMMAR_CHARACTERS, GrammarCompiler, GrammarMatcher

EOS, OTHER_EOS = 1, 2
# More logits than tokens, as many checkpoints have.
NUM_ROWS = VOCAB_SIZE + 77


def compiler(make: Callable[[], tokenizers.Tokenizer] = one_character_per_token) -> GrammarCompiler:
    return GrammarCompiler(make(), vocab_size=NUM_ROWS, eos_token_ids=[EOS, OTHER_EOS])


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def id_of(character: str) -> int:
    token_id = one_character_per_token().token_to_id(character)
    assert token_id is not None
    return token_id


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = np.empty(matcher.num_mask_words, dtype=np.int32)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_every_end_of_text_is_allowed_where_one_is_and_nowhere_else() -> None:
    a, b = id_of("a"), id_of("b")
    matcher = compiler().matcher(regex("ab*"))
    assert allowed(matcher) == {a}
    matcher.accept(a)
    assert allowed(matcher) == {b, EOS, OTHER_EOS} and not matcher.is_complete
    matcher.accept(OTHER_EOS)
    assert matcher.is_complete


def test_rows_without_a_token_and_special_tokens_are_never_allowed() -> None:
    matcher = compiler().matcher(regex("[^x]*"))
    x = id_of("x")
    assert allowed(matcher) == {EOS, OTHER_EOS, *range(4, VOCAB_SIZE)} - {x}


@pytest.mark.parametrize("make", [one_character_per_token, bytes_and_pieces])
@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "properties": {"a<eos> 一 p1": {"type": "integer"}}, "required": ["a<eos> 一 p1"]},
        {"enum": ["hello", "held", 12, None]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    ],
)
def test_any_walk_through_the_masks_ends_in_valid_json(
    make: Callable[[], tokenizers.Tokenizer], value: dict[str, object]
) -> None:
    """Also where names hold characters of several tokens, or the text of a special token."""
    tokenizer = make()
    rng = np.random.default_rng(3)
    shared = compiler(make)
    spelled = shared._tokenizer  # the bytes that the grammar sees
    for _ in range(8):
        matcher = shared.matcher(schema(value | {"additionalProperties": False}))
        tokens: list[int] = []
        while not matcher.is_complete:
            choices = sorted(allowed(matcher))
            # Mostly the shortest way out, or integers would be endless.
            ends = [token for token in choices if tokenizer.id_to_token(token) in ("}", "]", '"', "<0x7D>")]
            tokens.append(int(rng.choice(ends if ends and rng.random() < 0.7 else choices)))
            matcher.accept(tokens[-1])
        text = spelled.decode_bytes([token for token in tokens if token not in (EOS, OTHER_EOS)]).decode()
        json.loads(text)


def test_text_that_no_token_spells_fails_closed() -> None:
    matcher = compiler().matcher(schema({"const": "aé"}))
    with pytest.raises(RequestError, match="cannot be followed"):
        for _ in range(6):
            assert not matcher.is_complete
            matcher.accept(min(allowed(matcher)))


def test_matchers_of_one_grammar_do_not_move_each_other() -> None:
    shared = compiler()
    first, second = shared.matcher(regex("ab")), shared.matcher(regex("ab"))
    before = allowed(second)
    first.accept(next(iter(allowed(first))))
    assert allowed(second) == before != allowed(first)


def test_a_token_that_was_not_allowed_is_an_error_that_stays() -> None:
    matcher = compiler().matcher(regex("ab"))
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be followed"):
            matcher.accept(id_of("x"))
    # The library itself would allow the end of the text here.
    with pytest.raises(RequestError, match="cannot be followed"):
        allowed(matcher)
    assert not matcher.is_complete


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("no grammar at all", "cannot be compiled"),
        (regex("("), "unclosed group"),
        (schema({"type": "object", "properties": {"foo": "bar"}}), "cannot be compiled"),
        (schema({"$ref": "#/$defs/missing"}), "cannot be compiled"),
        (regex("(a{1,9}){1,9}" * 40_000), f"this server takes {MAX_GRAMMAR_CHARACTERS}"),
        (regex("(" * 100_000 + ")" * 100_000), "cannot be compiled"),
        ('{"grammars":[{"json_schema":' + '{"items":' * 9_000 + "{}" + "}" * 9_000 + "}]}", "recursion"),
    ],
)
def test_a_bad_grammar_is_refused_in_bounded_words(grammar: str, words: str) -> None:
    shared = compiler()
    message = shared.check(grammar)
    assert message is not None and words in message and len(message) < 700
    with pytest.raises(RequestError):
        shared.matcher(grammar)
    assert shared.check(schema({"type": "integer"})) is None


def test_a_long_chain_of_references_ends_no_process() -> None:
    """In a process of its own: without a deep stack for the compiler it would die of a signal."""
    program = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from support.tiny_models import one_character_per_token\n"
        "from forkpoint.scheduler.grammar import GrammarCompiler\n"
        "compiler = GrammarCompiler(one_character_per_token(), vocab_size=320, eos_token_ids=[1])\n"
        "defs = {f'd{i}': {'items': {'$ref': f'#/$defs/d{i + 1}'}} for i in range(1500)} | {'d1500': {}}\n"
        "schema = {'$ref': '#/$defs/d0', '$defs': defs}\n"
        "print(compiler.check(json.dumps({'grammars': [{'json_schema': schema}]})))\n"
    )
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", program, str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]


def test_the_ends_of_a_text_can_be_masked() -> None:
    matcher = compiler().matcher(regex("a*"))
    constraint = Constraint(matcher, [EOS, OTHER_EOS, NUM_ROWS - 1])
    with_ends, without = constraint.mask(may_end=True), constraint.mask(may_end=False)
    bits = [np.unpackbits(mask.view(np.uint8), bitorder="little") for mask in (with_ends, without)]
    assert np.flatnonzero(bits[0] != bits[1]).tolist() == [EOS, OTHER_EOS]


def test_a_model_without_an_end_of_text_has_no_grammars() -> None:
    with pytest.raises(ModelLoadError, match="no token ends a text"):
        GrammarCompiler(one_character_per_token(), vocab_size=NUM_ROWS, eos_token_ids=[])


def test_the_end_of_text_in_the_tokenizers_settings_counts(tmp_path: Path) -> None:
    one_character_per_token().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<bos>"}}')
    assert GrammarCompiler.load(tmp_path, NUM_ROWS, [EOS]).eos_token_ids == {EOS, 2}


@pytest.mark.parametrize("make", [one_character_per_token, bytes_and_pieces])
@pytest.mark.parametrize(
    "pattern", ["hello (low|world) hello hello hello", "(he|hello)+ world{3,5}", "a{40}b?"]
)
def test_masks_of_forced_runs_are_the_library_s_own(
    make: Callable[[], tokenizers.Tokenizer], pattern: str
) -> None:
    grammars = compiler(make)
    matcher = grammars.matcher(regex(pattern))
    for _ in range(60):
        # A matcher that comes new to the same place has no run of its own.
        fresh = GrammarMatcher(matcher._matcher.deep_copy(), num_mask_words=matcher.num_mask_words)
        tokens = allowed(matcher)
        assert tokens == allowed(fresh)
        if EOS in tokens:
            break
        matcher.accept(min(tokens))
    assert EOS in tokens


def test_a_long_forced_run_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_masks = 0
    fill = fill_next_token_bitmask

    def counting(*arguments: Any) -> None:
        nonlocal num_masks
        num_masks += 1
        fill(*arguments)

    monkeypatch.setattr(grammar_module, "fill_next_token_bitmask", counting)
    matcher = compiler().matcher(regex("a" * 2000))
    for _ in range(2000):
        (only,) = allowed(matcher)
        matcher.accept(only)
    assert matcher.is_complete
    assert num_masks < 20
