"""The API process's tokenizer: text to token ids and back, from a checkpoint's tokenizer.json.

Built on `tokenizers` alone. `transformers.AutoTokenizer` does the same and takes 4.1 s and 245 MB to
import, since it brings torch along; `tokenizers` takes 0.06 s and 16 MB (November 2026, two cores).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError, RequestError
from forkpoint.configs.token_bytes import DecodingRules
from forkpoint.server.detokenize import IncrementalDetokenizer

# Normalisers that make no text shorter, as sentencepiece's "▁" for a space.
_KEEPING_LENGTH = ("Replace", "Prepend", "ByteLevel")
# NFC, the normaliser of Qwen, makes one character of a letter and up to three marks (U+1F82 and its like).
MAX_COMPOSED_CHARACTERS = 4


class Tokenizer:
    """Tokenizer of one model. Every method may be called from any thread."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        bos_token: str | None = None,
    ) -> None:
        """backend is owned from now on: padding and truncation are turned off in it."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        # The decoder's pickled state is its JSON; the whole tokenizer's JSON would be 33 MB for Gemma.
        self._rules = DecodingRules.from_decoder(json.loads(backend.decoder.__getstate__()))
        self._eos_token_ids = eos_token_ids
        self._bos_token = bos_token
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._vocab_size = 1 + max(vocabulary.values(), default=-1)
        normaliser = json.loads(backend.normalizer.__getstate__()) if backend.normalizer else None
        self._max_token_characters = max(map(len, vocabulary), default=1) * _shrinking(normaliser)
        # Filled as tokens come up: a table of 262,144 entries would take a second to build, a reply needs a
        # few hundred of them. Two threads may both fill an entry, with the same value.
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer.json and the ids that end a text. Raises ModelLoadError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{model_dir} has no tokenizer.json",
                hint="make one with transformers: AutoTokenizer.from_pretrained(X).save_pretrained(X)",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception for every fault of the file
            raise ModelLoadError(f"{path} cannot be read: {exc}") from exc
        settings = read_json(model_dir / "tokenizer_config.json")
        eos_ids = _ids(read_json(model_dir / "generation_config.json").get("eos_token_id"))
        config = read_json(model_dir / "config.json")
        for part in (config, config.get("text_config") or {}):
            eos_ids |= _ids(part.get("eos_token_id"))
        if (eos_token := token_text(settings.get("eos_token"))) is not None:
            eos_ids |= _ids(backend.token_to_id(eos_token))
        return cls(backend, eos_token_ids=eos_ids, bos_token=token_text(settings.get("bos_token")))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a text; the model may have more rows than that."""
        return self._vocab_size

    @property
    def max_token_characters(self) -> int:
        """A text of n characters has at least n / this many tokens (spaces beside a special token apart)."""
        return self._max_token_characters

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text, from all the files that name one."""
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return None if self._bos_token is None else self._backend.token_to_id(self._bos_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids of `text`: [n] int32. Blocks without the GIL: call it in a worker thread.

        add_special_tokens: put before and after the text what the model expects there, unless the text
            begins with the BOS token already (a rendered chat template often does): BOS is never doubled.
        Raises RequestError for lone surrogates.
        """
        add_special_tokens = self._adds_special_tokens(text, add_special_tokens)
        # encode() holds the GIL for hundreds of milliseconds on a long prompt; encode_batch_fast() does not.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.asarray(encoding.ids, dtype=np.int32)

    def encode_with_cuts(
        self, text: str, cuts: Sequence[int], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], tuple[int, ...]]:
        """As encode(), and for each cut how many of the first tokens end at or before it.

        cuts: character positions in [0, len(text)]. A token that spans a cut lies behind it (but a mark
        that NFC merges into the letter before it counts as a part of that letter). Tokens that encode() puts
        before the text count. Takes 1.5 times as long as encode(), in a worker thread too.
        """
        add_special_tokens = self._adds_special_tokens(text, add_special_tokens)
        # Lets the GIL go as encode_batch_fast() does, which knows no offsets. Asking for single tokens: the
        # list of all offsets would take 0.25 us a token to build, with the GIL held.
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids = np.asarray(encoding.ids, dtype=np.int32)
        return ids, tuple(_num_tokens_at(encoding, text, cut) for cut in cuts)

    def _adds_special_tokens(self, text: str, is_wanted: bool) -> bool:
        """Whether the backend is to add them to this text. Raises RequestError for lone surrogates."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise RequestError(
                f"text has a lone surrogate (U+{ord(text[exc.start]):04X}) at character {exc.start}; "
                "it is no valid Unicode, send the whole character"
            ) from exc
        return is_wanted and not (self._bos_token and text.startswith(self._bos_token))

    def decode(self, ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Text of all of `ids` as a text of its own.

        The space that sentencepiece puts before a text is taken off.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        text = detokenizer.push([int(token_id) for token_id in ids]) + detokenizer.finish()
        num_spaces = len(text) - len(text.lstrip(" "))
        return text[min(num_spaces, self._rules.num_stripped_spaces) :]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown_special_tokens: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        """A new detokenizer for one output. shown_special_tokens: special tokens that are not skipped.

        An id that has no text (a row that only pads the model's matrix) gives none.
        """
        if not skip_special_tokens:
            return IncrementalDetokenizer(self.token_bytes)
        shown_ids = {self._backend.token_to_id(token) for token in shown_special_tokens}
        skipped_ids = self._special_ids - shown_ids if shown_ids else self._special_ids

        def token_bytes(token_id: int) -> bytes:
            return b"" if token_id in skipped_ids else self.token_bytes(token_id)

        return IncrementalDetokenizer(token_bytes)

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token of this text; None if there is none, so that it is plain text."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, perhaps a part of a character; special tokens spelled out."""
        if (known := self._bytes_of.get(token_id)) is not None:
            return known
        token = self._backend.id_to_token(token_id)
        token_bytes = b"" if token is None else self._rules.token_bytes(token)
        self._bytes_of[token_id] = token_bytes
        return token_bytes


def _num_tokens_at(encoding: tokenizers.Encoding, text: str, cut: int) -> int:
    """How many of the first tokens of `text` end at or before the character position `cut`."""
    # The token that holds the next character. Some tokenizers leave spaces out of their tokens' offsets.
    next_character = next((i for i in range(cut, len(text)) if text[i] != " "), len(text))
    token = encoding.char_to_token(cut) if cut < len(text) else None
    if token is None and next_character < len(text):
        token = encoding.char_to_token(next_character)
    num_tokens = len(encoding.ids) if token is None else token
    if token is None:
        while num_tokens > 0 and encoding.token_to_chars(num_tokens - 1) is None:
            num_tokens -= 1  # put after the text by encode()
    while num_tokens > 0 and (span := encoding.token_to_chars(num_tokens - 1)) and span[1] > cut:
        num_tokens -= 1
    return num_tokens


def read_json(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's JSON file; empty where the file is absent. Raises ModelLoadError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelLoadError(f"{path} is no valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}; a JSON object is expected")
    return content


def token_text(token: Any) -> str | None:
    """Text of a token in tokenizer_config.json: a string, or an object that has it as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _shrinking(normaliser: dict[str, Any] | None) -> int:
    """How many characters of a text may become one before it is cut into tokens."""
    steps = normaliser["normalizers"] if normaliser and normaliser["type"] == "Sequence" else [normaliser]
    if all(step is None or step["type"] in _KEEPING_LENGTH for step in steps):
        return 1
    return MAX_COMPOSED_CHARACTERS


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in values if isinstance(token_id, int))
