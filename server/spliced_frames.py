"""Event frames of a stream's plain text: most frames of a stream differ in one string alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import orjson


class SplicedFrames:
    """Frames that `encode` gives for texts, encoded once with a mark in the text's place.

    Writing a text between the two halves takes 0.4 us; building and encoding the whole chunk takes 3
    (November 2026).
    """

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = encode(mark).split(orjson.dumps(mark))

    def frame(self, text: str) -> bytes:
        """The same bytes as encode(text)."""
        return self._before + orjson.dumps(text) + self._after
