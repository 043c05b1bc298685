"""How the API process talks to an engine: one interface, whether the engine is a process or in-line."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

from forkpoint.scheduler.messages import (
    CacheDescribed,
    EngineInfo,
    EngineStats,
    Finish,
    LoadProgress,
    PromptScores,
    Started,
    StepTokens,
    Submit,
    TokenLogprobs,
)


class EngineState(enum.Enum):
    LOADING = "loading"  # the process lives, weights are being read; requests are refused
    READY = "ready"  # requests are taken
    DEAD = "dead"  # the process ended and is not back yet; requests are refused
    STOPPED = "stopped"  # stop() was called; nothing comes after


class TokenDelta(NamedTuple):
    """News of one sequence since the last read: tokens merged when the reader was slow.

    A tuple, since one is made for nearly every token: a frozen dataclass takes three times as long to make.

    started is set with the first delta, and again when its numbers grow. finish is set once, with the last.
    logprobs: of `tokens`, one place each, if they were asked for. prompt_scores: pieces as they came.
    """

    tokens: tuple[int, ...]
    started: Started | None
    finish: Finish | None
    logprobs: TokenLogprobs | None = None
    prompt_scores: tuple[PromptScores, ...] = ()


class TokenMailbox:
    """One-slot mailbox of one sequence: the engine never waits for a reader, tokens merge instead.

    Mutable, for one reader on the event loop.
    """

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self._tokens: list[int] = []
        self._started: Started | None = None
        self._finish: Finish | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_scores: list[PromptScores] = []
        self._error: Exception | None = None
        self._has_news = False
        self._wake: Callable[[], None] | None = None

    def put(
        self,
        tokens: tuple[int, ...] = (),
        *,
        started: Started | None = None,
        finish: Finish | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_scores: tuple[PromptScores, ...] = (),
    ) -> None:
        """logprobs: one place for each of `tokens`, with every put() of a sequence that asked for them."""
        self._tokens.extend(tokens)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._prompt_scores.extend(prompt_scores)
        self._started = started or self._started
        self._finish = finish or self._finish
        self._has_news = True
        self._tell()

    def put_token(self, token: int) -> None:
        """put() of one token and nothing else, which is what nearly every step has."""
        self._tokens.append(token)
        self._has_news = True
        if self._wake is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Make take() raise `error` once the tokens that arrived before it have been read."""
        self._error = error
        self._tell()

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is something to take, at once if there is. It must not block.

        One reader may wait for many mailboxes so, without a task for each.
        """
        self._wake = wake
        if self._has_news or self._error is not None:
            wake()

    def take(self) -> TokenDelta | None:
        """The news, or None. Raises EngineDied, each time, if the engine went away and nothing is left."""
        if not self._has_news:
            if self._error is not None:
                raise self._error
            return None
        logprobs = TokenLogprobs.join(self._logprobs) if self._logprobs else None
        delta = TokenDelta(
            tuple(self._tokens), self._started, self._finish, logprobs, tuple(self._prompt_scores)
        )
        self._tokens, self._started, self._finish = [], None, None
        self._logprobs, self._prompt_scores = [], []
        self._has_news = False
        return delta

    async def get(self) -> TokenDelta:
        """Wait for news and take it. Raises what take() does."""
        news = asyncio.Event()
        self.on_news(news.set)
        while (delta := self.take()) is None:
            await news.wait()
            news.clear()
        return delta

    def _tell(self) -> None:
        if self._wake is not None:
            self._wake()


class EngineClient(Protocol):
    """What the server may ask of an engine. All methods are called on the event loop."""

    @property
    def state(self) -> EngineState: ...
    @property
    def info(self) -> EngineInfo | None:
        """None until the engine was ready once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """As of the last step. Counters start again from 0 when the engine is restarted."""
        ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def seconds_since_step(self) -> float:
        """How long the engine has had work without finishing a step; 0 when it is idle."""
        ...

    def on_step(self, listener: Callable[[StepTokens], None]) -> None:
        """Call `listener` with every step's message (metrics). It must not raise or block."""
        ...

    def on_progress(self, listener: Callable[[LoadProgress], None]) -> None: ...

    async def start(self) -> None:
        """Begin loading; returns at once. `state` and `wait_ready` tell the rest."""
        ...

    async def wait_ready(self) -> EngineInfo:
        """Raises ModelLoadError or EngineDied when loading failed."""
        ...

    def submit(self, submit: Submit) -> TokenMailbox:
        """Raises EngineLoading, EngineDied or QueueFull."""
        ...

    def abort(self, uid: int) -> None:
        """Idempotent; the mailbox gets Finish(reason="abort") if it had none."""
        ...

    async def flush_cache(self) -> bool:
        """False while sequences run or wait."""
        ...

    async def describe_cache(self, max_nodes: int) -> CacheDescribed:
        """What the prefix cache holds, at most max_nodes nodes of it. Waits for the step in progress."""
        ...

    async def stop(self) -> None:
        """End the engine; running sequences fail with EngineDied."""
        ...
