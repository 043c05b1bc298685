"""One choice of a request: token deltas from the engine in, text events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from forkpoint.configs.errors import EngineDied
from forkpoint.scheduler.client import TokenDelta, TokenMailbox
from forkpoint.scheduler.messages import Finish, Started
from forkpoint.server.errors import GenerationFailed
from forkpoint.server.request_metrics import ChoiceTimer
from forkpoint.server.stop import StopMatcher
from forkpoint.server.text_ports import Detokenizer

StopReason = str | int | None


@dataclass(frozen=True, slots=True)
class ChoiceStarted:
    """The engine took the choice up; comes once, before everything else of it."""

    index: int


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """New text, never empty, never the beginning of a stop string."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last event of a choice. stop_reason: the stop string or own stop token that ended it."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason


ChoiceEvent = ChoiceStarted | ChoiceText | ChoiceFinished


@dataclass(frozen=True, slots=True)
class ChoiceEnding:
    """What ends a choice: end_token_ids end it and stay out of its text, own_stop_token_ids are reported."""

    end_token_ids: frozenset[int]
    own_stop_token_ids: frozenset[int]


class Choice:
    """Mutable: follows one sequence from submission to its end.

    is_finished: its last event is known. runs_in_engine: the engine has not said that it is done with it.
    """

    def __init__(
        self,
        index: int,
        mailbox: TokenMailbox,
        detokenizer: Detokenizer,
        matcher: StopMatcher,
        ending: ChoiceEnding,
        timer: ChoiceTimer,
    ) -> None:
        self.index = index
        self.uid = mailbox.uid
        self.started: Started | None = None
        self.num_tokens = 0
        self.is_finished = False
        self.runs_in_engine = True
        self._mailbox = mailbox
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._ending = ending
        self._timer = timer

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Every event of this choice. Raises GenerationFailed, or EngineDied if it was still waiting."""
        has_started = False
        while not self.is_finished:
            delta = await self._next_delta()
            if not has_started:
                has_started = True
                yield ChoiceStarted(self.index)
            text = self._absorb(delta.tokens)
            finished = self._finish_of(delta.finish)
            if finished is not None and self._matcher.matched is None:
                text += self._flush()
                finished = self._finish_of(delta.finish)
            if finished is not None:
                self.is_finished = True
                self._timer.finished(finished.finish_reason)
            if text:
                yield ChoiceText(self.index, text)
            if finished is not None:
                yield finished

    def abandon(self, reason: Literal["abort", "error"]) -> None:
        """Record that nobody will read on."""
        self.is_finished = True
        self._timer.finished(reason)

    async def _next_delta(self) -> TokenDelta:
        try:
            delta = await self._mailbox.get()
        except EngineDied as error:
            if self.started is None:
                raise
            raise GenerationFailed("the engine ended while this request was running") from error
        if delta.started is not None:
            if self.started is None:
                self._timer.started(delta.started.queue_time_s)
            self.started = delta.started
        if delta.finish is not None:
            self.runs_in_engine = False
        if delta.finish is not None and delta.finish.reason in ("error", "abort"):
            raise GenerationFailed(delta.finish.message or "the engine gave this request up")
        return delta

    def _absorb(self, tokens: tuple[int, ...]) -> str:
        """Text that may be sent, one token at a time so that tokens after a stop string are not counted."""
        pieces = []
        num_before = self.num_tokens
        for token in tokens:
            self.num_tokens += 1
            if token in self._ending.end_token_ids:
                break
            piece, matched = self._matcher.push(self._detokenizer.push((token,)))
            pieces.append(piece)
            if matched is not None:
                break
        self._timer.tokens(self.num_tokens - num_before)
        return "".join(pieces)

    def _flush(self) -> str:
        piece, _ = self._matcher.push(self._detokenizer.finish())
        return piece + self._matcher.finish()

    def _finish_of(self, finish: Finish | None) -> ChoiceFinished | None:
        if self._matcher.matched is not None:
            return ChoiceFinished(self.index, "stop", self._matcher.matched)
        if finish is None:
            return None
        if finish.reason == "length":
            return ChoiceFinished(self.index, "length", None)
        own = finish.stop_token_id if finish.stop_token_id in self._ending.own_stop_token_ids else None
        return ChoiceFinished(self.index, "stop", own)
