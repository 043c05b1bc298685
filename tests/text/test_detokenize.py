"""Streamed text equals whole text, for both ways of spelling bytes and for bytes that are no text at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.tiny_tokenizers import byte_level, sentencepiece_like

from forkpoint.server.detokenize import IncrementalDetokenizer
from forkpoint.server.text import Tokenizer

BACKENDS = {
    "gemma": sentencepiece_like(),
    "llama": sentencepiece_like(strips_prefix_space=True),
    "qwen": byte_level(),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("Hel wor\n日本語🚂👩‍👩‍👧é\u0301ß\x00"), st.characters(codec="utf-8")),
    max_size=30,
)
each_tokenizer = pytest.mark.parametrize("name", list(TOKENIZERS))


def pieces(draw: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    edges = [0, *cuts, len(ids)]
    return [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@each_tokenizer
@given(data=st.data())
def test_any_split_of_any_tokens_gives_the_same_text(name: str, data: st.DataObject) -> None:
    """Random ids: half characters, lone continuation bytes, special tokens, ids without a text."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    at_once = tokenizer.detokenizer()
    whole = at_once.push(ids) + at_once.finish()
    detokenizer = tokenizer.detokenizer()
    streamed = "".join(detokenizer.push(piece) for piece in pieces(data, ids)) + detokenizer.finish()
    assert streamed == whole
    assert tokenizer.decode(ids) in (whole, whole.removeprefix(" "))


@each_tokenizer
@given(data=st.data())
def test_text_that_was_tokenised_comes_back_without_replacement_characters(
    name: str, data: st.DataObject
) -> None:
    text = data.draw(TEXTS.filter(lambda text: "\ufffd" not in text and "<" not in text))
    tokenizer, backend = TOKENIZERS[name], BACKENDS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert tokenizer.decode(ids) == backend.decode(ids)
    detokenizer = tokenizer.detokenizer()
    emitted = [detokenizer.push(piece) for piece in pieces(data, ids)]
    assert not any("\ufffd" in piece for piece in emitted)
    assert detokenizer.finish() == ""


@settings(max_examples=50)
@given(st.binary(max_size=12), st.data())
def test_invalid_bytes_become_what_utf8_says(raw: bytes, data: st.DataObject) -> None:
    detokenizer = IncrementalDetokenizer(lambda token_id: bytes([token_id]))
    streamed = "".join(detokenizer.push(piece) for piece in pieces(data, list(raw))) + detokenizer.finish()
    assert streamed == raw.decode("utf-8", errors="replace")


def test_a_character_is_given_when_its_last_byte_is_there() -> None:
    tokenizer = TOKENIZERS["gemma"]
    detokenizer = tokenizer.detokenizer()
    zero_byte = 4  # <0x00> of the tiny vocabulary
    train = [zero_byte + byte for byte in "🚂".encode()]
    assert [detokenizer.push([token_id]) for token_id in train] == ["", "", "", "🚂"]
    assert detokenizer.push(train[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_continuation_keeps_its_leading_space_and_a_whole_text_does_not() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode("world", add_special_tokens=False).tolist()
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids) == " world"
    assert tokenizer.decode(ids) == "world"


@each_tokenizer
def test_special_tokens_are_shown_only_when_asked_for(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    special = min(tokenizer._special_ids)
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    hidden = tokenizer.detokenizer(skip_special_tokens=True)
    assert shown.push([special]) == BACKENDS[name].id_to_token(special)
    assert hidden.push([special]) == ""


def test_an_added_token_that_is_not_special_is_text() -> None:
    tokenizer = TOKENIZERS["qwen"]
    ids = tokenizer.encode("a<think> 日b").tolist()
    assert tokenizer.decode(ids) == "a<think> 日b" == BACKENDS["qwen"].decode(ids)
