"""Which generation requests are under way, and how far: for the page and `forkpoint top`. Counts only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from forkpoint.server.generation import Generation

RequestState = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request as of now. Tokens as in Usage; computed: prompt tokens neither cached nor rebuilt."""

    id: str
    path: str
    state: RequestState
    age_s: float
    choices: int
    prompt_tokens: int
    cached_tokens: int
    rebuilt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Entry:
    request_id: str
    path: str
    begin_s: float
    generation: Generation

    def look(self, now_s: float) -> LiveRequest:
        usage, choices = self.generation.usage, self.generation.choices
        has_started = any(choice.started is not None for choice in choices)
        state: RequestState = "waiting"
        if usage.completion_tokens:
            state = "decode"
        elif has_started:
            state = "prefill"
        return LiveRequest(
            id=self.request_id,
            path=self.path,
            state=state,
            age_s=round(now_s - self.begin_s, 3),
            choices=len(choices),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            rebuilt_tokens=usage.rebuilt_tokens,
            completion_tokens=usage.completion_tokens,
        )


class LiveRequests:
    """Mutable; used on the event loop only."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    @contextmanager
    def following(self, request_id: str, path: str, generation: Generation) -> Iterator[None]:
        """Count this request in while the context lasts. Ids are the clients' own and need not differ."""
        key = id(generation)
        self._entries[key] = _Entry(request_id, path, time.monotonic(), generation)
        try:
            yield
        finally:
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def oldest(self, count: int) -> list[LiveRequest]:
        """The `count` requests that have been here longest, oldest first."""
        now_s = time.monotonic()
        return [entry.look(now_s) for entry in list(self._entries.values())[:count]]
