"""What the APIs have in common in the shape of their answers; chat.py and completions.py fill it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forkpoint.server.choice import ChoiceDelta, ChoiceEvent, ChoiceFinished, ChoicePrompt
from forkpoint.server.message_pieces import CallPiece, ContentPiece, ReasoningPiece
from forkpoint.server.token_entries import TokenEntry
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
class ToolCall:
    """One call that the model makes. arguments: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of a non-streaming answer. entries: of its tokens, prompt_entries of the prompt's."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    entries: tuple[TokenEntry, ...]
    prompt_entries: tuple[TokenEntry, ...]
    finish: ChoiceFinished


@dataclass
class ChoiceCollector:
    """Puts the events of one choice together. Mutable until finished() is called."""

    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)
    _entries: list[TokenEntry] = field(default_factory=list)
    _prompt_entries: tuple[TokenEntry, ...] = ()
    _finish: ChoiceFinished | None = None

    def add(self, event: ChoiceEvent) -> None:
        match event:
            case ChoicePrompt(entries=entries):
                self._prompt_entries = entries
            case ChoiceDelta(pieces=pieces, entries=entries):
                self._entries.extend(entries)
                for piece in pieces:
                    match piece:
                        case ContentPiece(text):
                            self._content.append(text)
                        case ReasoningPiece(text):
                            self._reasoning.append(text)
                        case CallPiece():
                            self._add_call(piece)
            case ChoiceFinished():
                self._finish = event

    def finished(self) -> FinishedChoice:
        """All of it; the choice must have ended."""
        assert self._finish is not None, "a choice ends with ChoiceFinished"
        arguments = ["".join(pieces) for pieces in self._arguments]
        return FinishedChoice(
            "".join(self._content),
            "".join(self._reasoning),
            tuple(map(ToolCall, self._names, arguments)),
            tuple(self._entries),
            self._prompt_entries,
            self._finish,
        )

    def _add_call(self, piece: CallPiece) -> None:
        if piece.name is not None:
            self._names.append(piece.name)
            self._arguments.append([])
        self._arguments[piece.call_index].append(piece.arguments)


class AnswerFormat(Protocol):
    """How one request is answered, as one object or in chunks. May remember what it has sent of a stream."""

    @property
    def response_id(self) -> str: ...

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> WireObject: ...

    def chunks(self, event: ChoiceEvent) -> Sequence[WireObject]:
        """None, one or several chunks for one event."""
        ...

    def plain_chunk(self, index: int, text: str) -> WireObject | None:
        """The chunk for more text of a choice and nothing else.

        None if there is more than `text` to tell two such chunks of one choice apart.
        """
        ...

    def usage_chunk(self, usage: Usage) -> WireObject: ...
