"""Splits off what a model thinks before it answers, between <think> and </think> or tags of the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.server.message_pieces import MessageParser, MessagePiece, ReasoningPiece
from forkpoint.server.parsers.cursor import Cursor, Reading


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """What stands before and after the reasoning."""

    opening: str
    closing: str


THINK = ThinkTags("<think>", "</think>")
MISTRAL_THINK = ThinkTags("[THINK]", "[/THINK]")


class ThinkParser:
    """Mutable; a MessageParser. What is no reasoning goes to the parser of the answer."""

    def __init__(
        self, tags: ThinkTags, new_answer_parser: Callable[[], MessageParser], *, is_open: bool
    ) -> None:
        """is_open: the prompt ends with the opening tag, so the output begins inside of the reasoning."""
        self._tags = tags
        self._answer = new_answer_parser()
        self._is_open = is_open
        self._cursor = Cursor()
        self._pieces: list[MessagePiece] = []
        self._is_reasoning = is_open
        self._space = ""  # the end of the reasoning so far: dropped if nothing but the tag follows
        self._reading = self._read()

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    def push(self, text: str) -> list[MessagePiece]:
        self._cursor.push(text)
        next(self._reading, None)
        return self._take()

    def finish(self) -> list[MessagePiece]:
        self._cursor.end()
        next(self._reading, None)
        return [*self._take(), *self._answer.finish()]

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        cursor.record()
        yield from cursor.skip_space()
        has_tag = yield from cursor.take_literal(self._tags.opening)
        space = cursor.recorded()
        if has_tag or self._is_open:
            self._is_reasoning = True
            yield from cursor.skip_space()
            yield from cursor.find((self._tags.closing,), self._reason)
            self._is_reasoning = False
            yield from cursor.skip_space()
        elif space:
            self._pieces += self._answer.push(space)
        while not cursor.has_ended:
            if text := cursor.take_available():
                self._pieces += self._answer.push(text)
            yield
        if text := cursor.take_available():
            self._pieces += self._answer.push(text)

    def _reason(self, text: str) -> None:
        text = self._space + text
        told = text.rstrip(" \t\r\n")
        self._space = text[len(told) :]
        if told:
            self._pieces.append(ReasoningPiece(told))

    def _take(self) -> list[MessagePiece]:
        pieces, self._pieces = self._pieces, []
        return pieces
