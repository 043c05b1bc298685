"""Log-probabilities of the tokens of one choice, and which of them belong to text that was given out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.scheduler.messages import TokenLogprobs

# OpenAI's stand-in for minus infinity, which JSON cannot say.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token as log-probabilities show it. logprob: None for the first token of a prompt.

    top: the most likely tokens in its place and their log-probabilities, falling; as many as were asked for.
    text_offset: where its text begins, in characters from the beginning of the choice's text (or, in a
    prompt, of the prompt's); a token that ends a character begins where that character does.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    text_offset: int


def entries_of(token_ids: Sequence[int], logprobs: TokenLogprobs, offsets: Sequence[int]) -> list[TokenEntry]:
    """An entry for each of `offsets`, text offsets of the first token_ids; no infinity or NaN in them."""
    values = _finite(logprobs.token_logprobs)
    top_ids, top_values = logprobs.top_ids.tolist(), _finite(logprobs.top_logprobs)
    return [
        TokenEntry(token_ids[i], values[i], tuple(zip(top_ids[i], top_values[i], strict=True)), offset)
        for i, offset in enumerate(offsets)
    ]


class HeldEntries:
    """Entries of tokens whose text is not given out yet. Mutable: a queue in order of the text."""

    def __init__(self) -> None:
        self._entries: deque[TokenEntry] = deque()

    def hold(self, entries: Iterable[TokenEntry]) -> None:
        self._entries.extend(entries)

    def release(self, num_emitted: int) -> tuple[TokenEntry, ...]:
        """The entries of tokens that begin inside the first num_emitted characters of the text."""
        released = []
        while self._entries and self._entries[0].text_offset < num_emitted:
            released.append(self._entries.popleft())
        return tuple(released)

    def release_all(self) -> tuple[TokenEntry, ...]:
        released = tuple(self._entries)
        self._entries.clear()
        return released


def _finite(values: NDArray[np.float32]) -> Any:
    """The same in lists of lists."""
    return np.nan_to_num(values.astype(np.float64), nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).tolist()
