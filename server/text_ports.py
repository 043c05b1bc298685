"""What the HTTP layer needs of tokenizer and chat template: the seam at which tests put doubles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int], /) -> str: ...
    def finish(self) -> str: ...


class TextTokenizer(Protocol):
    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def max_token_characters(self) -> int:
        """The longest text of one token: a text of n characters has at least n / this many tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """[n] int32. Blocks for long texts without the GIL: use a worker thread. BOS is not doubled."""
        ...

    def encode_with_cuts(
        self, text: str, cuts: Sequence[int], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], tuple[int, ...]]:
        """As encode(), and for each cut (characters) how many of the first tokens end at or before it."""
        ...

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown_special_tokens: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """shown_special_tokens: special tokens that are not skipped."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all of `ids` as a text of its own."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token of this text; None if there is none, so that it is plain text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, perhaps a part of a character; special tokens spelled out."""
        ...


class PromptTemplate(Protocol):
    @property
    def source(self) -> str:
        """The template's own text, in which a model family can be recognised."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; contents are strings or lists of text parts.

        Raises RequestError if the template refuses the messages or template_kwargs sets reserved names.
        """
        ...
