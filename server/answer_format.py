"""What the two APIs have in common in the shape of their answers; chat.py and completions.py fill it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forkpoint.server.choice import ChoiceEvent, ChoiceFinished
from forkpoint.server.usage import Usage

WireObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The same in the answer and in every chunk of one request. created: Unix time in seconds."""

    id: str
    created: int
    model: str

    def as_json(self, object_name: str) -> WireObject:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class FinishedText:
    """One choice of a non-streaming answer."""

    text: str
    finish: ChoiceFinished


class AnswerFormat(Protocol):
    """How one request is answered, as one object or in chunks."""

    def answer(self, choices: Sequence[FinishedText], usage: Usage) -> WireObject: ...

    def chunk(self, event: ChoiceEvent) -> WireObject | None:
        """None for an event that this API does not show."""
        ...

    def usage_chunk(self, usage: Usage) -> WireObject: ...
