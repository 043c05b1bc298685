"""What is known of one request after it ended: times, counts, or why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """An event of a stream that brought text. num_tokens: of the answer up to here, where the server says."""

    at_s: float
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought; every time counts from sending it. None: the server does not say.

    ttft_s: until the first text. last_s: until the last event with a choice. itls_s: one for each token after
    the first (inter_token_latencies). gaps_s: between chunks. is_counted: the server told output_tokens;
    otherwise it is the number of chunks. prompt_tokens: as the server counts them.
    """

    text: str = ""
    ttft_s: float | None = None
    last_s: float | None = None
    itls_s: tuple[float, ...] = ()
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    is_counted: bool = False
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of the run. conversation, turn, prefix: its place in the workload (prefix None: no system).

    start_s: when it was sent, counted from the begin of the run. lag_s: how much later than planned that was.
    wanted_tokens: the output length that was asked for.
    """

    conversation: int
    turn: int
    prefix: int | None
    is_warmup: bool
    start_s: float
    lag_s: float
    wanted_tokens: int
    answer: Answer

    @property
    def has_failed(self) -> bool:
        return self.answer.error is not None

    @property
    def end_s(self) -> float:
        return self.start_s + (self.answer.last_s or 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for one token or none."""
        answer = self.answer
        if answer.last_s is None or answer.ttft_s is None or answer.output_tokens < 2:
            return None
        return (answer.last_s - answer.ttft_s) / (answer.output_tokens - 1)


def inter_token_latencies(chunks: Sequence[Chunk], num_tokens: int) -> tuple[float, ...]:
    """A latency for each token after those of the first chunk, whose sum is the time between the chunks.

    A chunk of k tokens that came g after the one before it gives k times g / k: so the mean does not depend
    on how a server cuts its stream, and a chunk counts as what it holds. Where the server does not count in
    each chunk, the num_tokens of the whole answer are spread evenly over the chunks.
    """
    latencies: list[float] = []
    if not chunks:
        return ()
    counts = _tokens_up_to(chunks, num_tokens)
    last_s, last_count = chunks[0].at_s, counts[0]
    for chunk, count in zip(chunks[1:], counts[1:], strict=True):
        if new := count - last_count:
            latencies += [(chunk.at_s - last_s) / new] * new
            last_s, last_count = chunk.at_s, count
    return tuple(latencies)


def _tokens_up_to(chunks: Sequence[Chunk], num_tokens: int) -> list[int]:
    """Tokens of the answer up to each chunk, never falling."""
    counts: list[int] = []
    told = [chunk.num_tokens for chunk in chunks]
    for index, count in enumerate(told):
        if count is None:
            # At least the first chunk holds a token: its text came from somewhere.
            count = max(1, (index + 1) * num_tokens // len(chunks))
        counts.append(max(count, counts[-1] if counts else 0))
    return counts
