"""Where a parser writes: content, reasoning and calls become the pieces of a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, ReasoningPiece

_SPACE = " \t\r\n"


class PieceWriter:
    """Mutable: numbers the calls, and drops white space that stands next to a call and nowhere else.

    is_reasoning: what is read now belongs to the reasoning; the reading says so.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        """max_calls: later calls are dropped; None: none are."""
        self.num_calls = 0
        self.is_reasoning = False
        self._max_calls = max_calls
        self._pieces: list[MessagePiece] = []
        self._is_after_call = False  # nothing but white space came after it
        self._spaces: list[str] = []  # the end of the content so far: what follows decides whether it is told

    def content(self, text: str) -> None:
        told = text.rstrip(_SPACE)
        if not told:
            if text and not self._is_after_call:
                self._spaces.append(text)
            return
        end = text[len(told) :]
        if self._is_after_call:
            told = told.lstrip(_SPACE)
        self._is_after_call = False
        self._pieces.append(ContentPiece("".join([*self._spaces, told])))
        self._spaces = [end] if end else []

    def reasoning(self, text: str) -> None:
        self._pieces.append(ReasoningPiece(text))

    def begin_call(self, name: str) -> None:
        """A call whose arguments follow, in pieces."""
        self._spaces = []
        self._is_after_call = True
        self.num_calls += 1
        if self._is_wanted:
            self._pieces.append(CallPiece(self.num_calls - 1, name, ""))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if self._is_wanted:
            self._pieces.append(CallPiece(self.num_calls - 1, None, text))

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A whole call."""
        self.begin_call(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))

    def finish(self) -> None:
        """The text ends: white space at its end belongs to the content after all."""
        if self._spaces:
            self._pieces.append(ContentPiece("".join(self._spaces)))
            self._spaces = []

    def take(self) -> list[MessagePiece]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls
