"""What a generated text is made of once it is parsed: content, reasoning, calls of tools.

A parser turns the text of one choice into pieces as it comes; parsers of model families live beside the table
that chooses them. Without a parser all text is content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of one call. call_index: 0 for the first call of the message.

    name: set in the first piece of each call and only there. arguments: more of their JSON text; joined over
    the pieces of a call it is the whole.
    """

    call_index: int
    name: str | None
    arguments: str


MessagePiece = ContentPiece | ReasoningPiece | CallPiece


class MessageParser(Protocol):
    """Parses the text of one choice. Mutable; how the text is split into pushes makes no difference."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what was pushed last belongs to the reasoning; for counting its tokens."""
        ...

    def push(self, text: str) -> list[MessagePiece]:
        """Take more text; give what is certain now."""
        ...

    def finish(self) -> list[MessagePiece]:
        """The text ends: give the rest. Text that only looked like a call becomes content."""
        ...


NewParser = Callable[[], MessageParser]


def joined(pieces: Sequence[MessagePiece]) -> tuple[MessagePiece, ...]:
    """The same news in as few pieces as possible: neighbours of one kind, or of one call, become one."""
    result: list[MessagePiece] = []
    for piece in pieces:
        match (result[-1] if result else None, piece):
            case (ContentPiece(before), ContentPiece(text)):
                result[-1] = ContentPiece(before + text)
            case (ReasoningPiece(before), ReasoningPiece(text)):
                result[-1] = ReasoningPiece(before + text)
            case (CallPiece(call, name, before), CallPiece(call_index=same, name=None, arguments=text)) if (
                call == same
            ):
                result[-1] = CallPiece(call, name, before + text)
            case _:
                result.append(piece)
    return tuple(result)
