"""Token ids to text, by way of bytes: a character is given out once all its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]


class IncrementalDetokenizer:
    """Text of tokens that arrive in pieces; joined, it is the text of all tokens at once, however they were
    split.

    It is made for text that continues a prompt, so a leading space of the first token stays. Bytes that can
    belong to no character become U+FFFD, and so do the bytes of a character that the last token leaves
    unfinished; nothing else does. O(bytes of the new tokens) per push.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between_characters = True

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; give the characters that are complete now."""
        new = b"".join(map(self._token_bytes, token_ids))
        if self._is_between_characters and new.isascii():  # most text, and a fifth of the time
            return new.decode("ascii")
        text = self._decoder.decode(new)
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """The output ends: give U+FFFD if it ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
