"""One choice of a request: token deltas from the engine in, text events out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forkpoint.configs.errors import EngineDied
from forkpoint.scheduler.client import TokenDelta, TokenMailbox
from forkpoint.scheduler.messages import Finish, PromptScores, Started, TokenLogprobs
from forkpoint.server.errors import GenerationFailed, GenerationRefused
from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessageParser, MessagePiece, joined
from forkpoint.server.prompts import TokenIds
from forkpoint.server.request_metrics import ChoiceTimer
from forkpoint.server.stop import StopMatcher
from forkpoint.server.text_ports import Detokenizer
from forkpoint.server.token_entries import HeldEntries, TokenEntry, entries_of

StopReason = str | int | None


@dataclass(frozen=True, slots=True)
class ChoiceStarted:
    """The engine took the choice up; comes once, before everything else of it."""

    index: int


@dataclass(frozen=True, slots=True)
class ChoicePrompt:
    """Comes once, before all text, in a choice that was asked to repeat its prompt.

    entries: of every token of the prompt, if log-probabilities were asked for.
    """

    index: int
    entries: tuple[TokenEntry, ...]


@dataclass(slots=True)
class ChoiceDelta:
    """News of the answer; never without pieces or entries, never the beginning of a stop string.

    Not frozen, since one is made for nearly every token: freezing triples what that takes.

    entries: of the tokens whose text this is, if log-probabilities were asked for. What a parser still holds
    back comes later than its tokens' entries.
    """

    index: int
    pieces: tuple[MessagePiece, ...]
    entries: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last event of a choice. stop_reason: the stop string or own stop token that ended it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason


ChoiceEvent = ChoiceStarted | ChoicePrompt | ChoiceDelta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class ChoiceEnding:
    """What ends a choice: end_token_ids end it and stay out of its text, own_stop_token_ids are reported."""

    end_token_ids: frozenset[int]
    own_stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before the answer. detokenizer: a fresh one, for the places of its tokens."""

    token_ids: TokenIds
    detokenizer: Detokenizer


@dataclass(frozen=True, slots=True)
class ChoiceReading:
    """How the tokens of one choice are read; made for this choice alone.

    min_tokens: stop strings are looked for from the text of this token on. parser: None: all is content.
    echo: the prompt, if the choice is to give its ChoicePrompt.
    """

    detokenizer: Detokenizer
    matcher: StopMatcher
    ending: ChoiceEnding
    min_tokens: int = 0
    parser: MessageParser | None = None
    echo: Echo | None = None


class Choice:
    """Mutable: follows one sequence from submission to its end.

    is_finished: its last event is known. runs_in_engine: the engine has not said that it is done with it.
    num_tokens: sampled ones up to the end of the text; num_reasoning_tokens of them were reasoning.
    """

    def __init__(self, index: int, mailbox: TokenMailbox, reading: ChoiceReading, timer: ChoiceTimer) -> None:
        self.index = index
        self.uid = mailbox.uid
        self.started: Started | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_finished = False
        self.runs_in_engine = True
        self.timer = timer
        self._mailbox = mailbox
        self._reading = reading
        self._end_token_ids = reading.ending.end_token_ids
        self._matcher = reading.matcher
        self._parser = reading.parser
        self._scores: list[PromptScores] = []
        self._held = HeldEntries()
        self._num_chars_read = 0  # of the text so far
        self._num_chars_emitted = 0  # of it past the stop strings
        self._pieces: list[MessagePiece] = []  # parsed and not yet told
        self._has_calls = False
        self._is_announced = False
        self._awaits_prompt = reading.echo is not None

    def on_news(self, wake: Callable[[], None]) -> None:
        """See TokenMailbox."""
        self._mailbox.on_news(wake)

    def take(self) -> list[ChoiceEvent]:
        """The events since the last take(), perhaps none. Does not wait.

        Raises GenerationFailed, or EngineDied if it was still waiting.
        """
        delta = self._next_delta()
        if delta is None:
            return []
        events: list[ChoiceEvent] = []
        if not self._is_announced:
            self._is_announced = True
            events.append(ChoiceStarted(self.index))
        self._scores.extend(delta.prompt_scores)
        if self._awaits_prompt and (delta.tokens or delta.finish is not None):
            self._awaits_prompt = False
            events.append(ChoicePrompt(self.index, self._prompt_entries()))
        text = self._absorb(delta)
        finished = self._finish_of(delta.finish)
        if finished is not None and self._matcher.matched is None:
            text += self._flush()
            finished = self._finish_of(delta.finish)
        self._num_chars_emitted += len(text)
        news = self._news(text, is_last=finished is not None)
        if news is not None:
            events.append(news)
        if finished is not None:
            if self._has_calls and finished.finish_reason == "stop":
                finished = ChoiceFinished(self.index, "tool_calls", None)
            self.is_finished = True
            self.timer.finished(finished.finish_reason)
            events.append(finished)
        return events

    def abandon(self, reason: Literal["abort", "error"]) -> None:
        """Record that nobody will read on."""
        self.is_finished = True
        self.timer.finished(reason)

    def _next_delta(self) -> TokenDelta | None:
        try:
            delta = self._mailbox.take()
        except EngineDied as error:
            if self.started is None:
                raise
            raise GenerationFailed("the engine ended while this request was running") from error
        if delta is None:
            return None
        if delta.started is not None:
            if self.started is None:
                self.timer.started(delta.started.queue_time_s)
            self.started = delta.started
        if delta.finish is not None:
            self.runs_in_engine = False
        if delta.finish is not None and delta.finish.reason in ("error", "abort"):
            kind = GenerationRefused if delta.finish.is_own_fault else GenerationFailed
            raise kind(delta.finish.message or "the engine gave this request up")
        return delta

    def _absorb(self, delta: TokenDelta) -> str:
        """Text that may be sent, one token at a time so that tokens after a stop string are not counted."""
        if not delta.tokens:
            return ""
        offsets: list[int] = []
        text = ""
        num_before = self.num_tokens
        for token in delta.tokens:
            self.num_tokens += 1
            if token in self._end_token_ids:
                break
            offsets.append(self._num_chars_read)
            text += self._read(token)
            if self._matcher.matched is not None:
                break
        if delta.logprobs is not None:
            self._held.hold(entries_of(delta.tokens, delta.logprobs, offsets))
        self.timer.tokens(self.num_tokens - num_before)
        return text

    def _read(self, token: int) -> str:
        """The text that one more token makes certain; the parser gets it too."""
        text = self._reading.detokenizer.push((token,))
        self._num_chars_read += len(text)
        if self.num_tokens >= self._reading.min_tokens:
            text, _ = self._matcher.push(text)
        if self._parser is not None:
            self._pieces += self._parser.push(text) if text else ()
            self.num_reasoning_tokens += self._parser.is_reasoning
        return text

    def _flush(self) -> str:
        text, _ = self._matcher.push(self._reading.detokenizer.finish())
        text += self._matcher.finish()
        if self._parser is not None and text:
            self._pieces += self._parser.push(text)
        return text

    def _news(self, text: str, *, is_last: bool) -> ChoiceDelta | None:
        """What the new text tells, with the entries of its tokens."""
        if self._parser is None:
            pieces: tuple[MessagePiece, ...] = (ContentPiece(text),) if text else ()
        else:
            if is_last:
                self._pieces += self._parser.finish()
            pieces, self._pieces = joined(self._pieces), []
            self._has_calls = self._has_calls or any(isinstance(piece, CallPiece) for piece in pieces)
        if is_last and self._matcher.matched is None:
            entries = self._held.release_all()
        else:
            entries = self._held.release(self._num_chars_emitted)
        return ChoiceDelta(self.index, pieces, entries) if pieces or entries else None

    def _prompt_entries(self) -> tuple[TokenEntry, ...]:
        if not self._scores:
            return ()
        echo = self._reading.echo
        assert echo is not None
        token_ids = echo.token_ids.tolist()
        offsets, num_chars = [], 0
        for token in token_ids:
            offsets.append(num_chars)
            num_chars += len(echo.detokenizer.push((token,)))
        logprobs = TokenLogprobs.join([scores.logprobs for scores in self._scores])
        return (TokenEntry(token_ids[0], None, (), 0), *entries_of(token_ids[1:], logprobs, offsets[1:]))

    def _finish_of(self, finish: Finish | None) -> ChoiceFinished | None:
        if self._matcher.matched is not None:
            return ChoiceFinished(self.index, "stop", self._matcher.matched)
        if finish is None:
            return None
        if finish.reason == "length":
            return ChoiceFinished(self.index, "length", None)
        own_ids = self._reading.ending.own_stop_token_ids
        own = finish.stop_token_id if finish.stop_token_id in own_ids else None
        return ChoiceFinished(self.index, "stop", own)
