"""The API process's tokenizer: BOS exactly once, every end token, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from text.tiny_tokenizers import byte_level, sentencepiece_like
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from forkpoint.configs.errors import ModelLoadError, RequestError
from forkpoint.server.text import MAX_COMPOSED_CHARACTERS, Tokenizer


def save(directory: Path, **files: Any) -> Path:
    sentencepiece_like().save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_bos_is_added_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, tokenizer_config={"bos_token": {"content": "<bos>"}}))
    assert tokenizer.bos_token_id == 2
    hello = tokenizer.encode("Hello", add_special_tokens=False).tolist()
    assert 2 not in hello
    assert tokenizer.encode("Hello").tolist() == [2, *hello]
    assert tokenizer.encode("<bos>Hello").tolist() == [2, *hello]
    assert tokenizer.encode("").tolist() == [2]


def test_ids_are_an_int32_array() -> None:
    assert Tokenizer(byte_level()).encode("naïve 🚂").dtype == "int32"


def test_end_ids_come_from_all_files(tmp_path: Path) -> None:
    save(
        tmp_path,
        generation_config={"eos_token_id": [1, 106]},
        config={"eos_token_id": 7, "text_config": {"eos_token_id": 8}},
        tokenizer_config={"eos_token": "<pad>"},
    )
    assert Tokenizer.load(tmp_path).eos_token_ids == {0, 1, 7, 8, 106}


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    save(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is no valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_is_not_known_is_refused() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_a_lone_surrogate_is_a_bad_request(text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        Tokenizer(byte_level()).encode(text)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    text = "Hello world, hello wörld! " * 3
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocab_size_counts_added_tokens() -> None:
    backend = byte_level()
    last_id = Tokenizer(backend).vocab_size - 1
    assert backend.id_to_token(last_id) == "<think> 日"
    assert backend.id_to_token(last_id + 1) is None


def test_no_text_has_fewer_tokens_than_the_bound_says() -> None:
    for tokenizer, text in (
        (Tokenizer(byte_level()), "ᾂ" * 50),
        (Tokenizer(sentencepiece_like()), "Hell world"),
    ):
        decomposed = text.replace("ᾂ", "α\u0313\u0300\u0345")
        ids = tokenizer.encode(decomposed, add_special_tokens=False)
        assert len(ids) * tokenizer.max_token_characters >= len(decomposed)
    longest = max(map(len, byte_level().get_vocab()))
    assert Tokenizer(byte_level()).max_token_characters == longest * MAX_COMPOSED_CHARACTERS


# ---- cuts


def test_tokens_that_span_a_cut_lie_behind_it() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), bos_token="<bos>")
    # <bos> Hell o ▁world <unk>: cuts inside of Hell and world, at their ends, and at the end of the text.
    text = "Hello world"
    ids, num_tokens = tokenizer.encode_with_cuts(text, (0, 3, 4, 5, 6, 10, 11))
    assert ids.tolist() == tokenizer.encode(text).tolist()
    assert [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids[:3]] == [
        "<bos>", "Hell", "o",
    ]  # fmt: skip
    assert num_tokens == (1, 1, 2, 3, 3, 3, 4)


def test_cuts_count_characters_however_many_tokens_one_has() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "a🦊b🦊"  # three tokens each
    ids, num_tokens = tokenizer.encode_with_cuts(text, range(5))
    assert len(ids) == 8
    assert num_tokens == (0, 1, 4, 5, 8)


@pytest.mark.parametrize("cut", range(12))
def test_cuts_are_right_where_offsets_leave_spaces_out(cut: int) -> None:
    text = "a   b\n\n  c  "
    plain, trimmed = byte_level(), byte_level()
    plain.post_processor = processors.ByteLevel(trim_offsets=False)
    trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
    expected = Tokenizer(plain).encode_with_cuts(text, (cut,))[1]
    assert Tokenizer(trimmed).encode_with_cuts(text, (cut,))[1] == expected


def test_tokens_put_after_a_text_lie_behind_every_cut() -> None:
    backend = sentencepiece_like()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0 <eos>:0", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    tokenizer = Tokenizer(backend)
    ids, num_tokens = tokenizer.encode_with_cuts("Hello", (4, 5))
    assert len(ids) == 4
    assert num_tokens == (2, 3)
    assert tokenizer.encode_with_cuts("Hello", (4, 5), add_special_tokens=False)[1] == (1, 2)


def test_encoding_with_cuts_refuses_what_encoding_refuses() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        Tokenizer(byte_level()).encode_with_cuts("ab\udfffc", (1,))


def test_the_api_process_gets_no_torch_from_here() -> None:
    code = (
        "import sys\n"
        "import forkpoint.server.text, forkpoint.server.stop, forkpoint.model.resolve\n"
        "from forkpoint.server.chat_template import ChatTemplate\n"
        "ChatTemplate('{{ messages[0].content }}', special_tokens={})\n"
        "assert 'transformers.utils.chat_template_utils' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
