"""What one step runs: spans of rows of sequences, in batch order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from forkpoint.cache import Lease
from forkpoint.scheduler.sequence import Sequence


class Span(NamedTuple):
    """Rows at positions start..end of one sequence. is_decode: the one row after its newest token.

    A tuple, since one is made for each sequence in each step: a frozen dataclass takes three times as long.
    """

    sequence: Sequence
    start: int
    end: int
    is_decode: bool

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the last row's logits give the next token."""
        return self.is_decode or (self.end == self.sequence.num_tokens and self.sequence.num_tokens_left > 0)

    @property
    def is_last(self) -> bool:
        """Whether everything is computed after it that there is."""
        return self.end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions of the rows whose logits score the prompt token after them."""
        sequence = self.sequence
        if self.is_decode or not sequence.is_scoring:
            return range(0)
        return range(max(self.start, sequence.next_scored - 1), min(self.end, sequence.prompt_len - 1))

    @property
    def lease(self) -> Lease:
        lease = self.sequence.lease
        assert lease is not None, "a planned sequence holds a lease"
        return lease


@dataclass(slots=True)
class PlanDraft:
    """Spans chosen so far for one step. Mutable: it collects. rows: what they take of the step's budget."""

    decodes: list[Span] = field(default_factory=list)
    chunks: list[Span] = field(default_factory=list)
    rows: int = 0

    @property
    def is_empty(self) -> bool:
        """Not the same as rows == 0: the first rows of a rebuild may cost nothing of the budget."""
        return not (self.decodes or self.chunks)

    def add_decode(self, span: Span) -> None:
        self.decodes.append(span)
        self.rows += 1

    def add_chunk(self, span: Span, rows: int) -> None:
        """rows: what the chunk takes of the budget, as WorkMeter tells."""
        self.chunks.append(span)
        self.rows += rows

    def plan(self) -> StepPlan:
        """Decode rows first: the order of the batch."""
        return StepPlan((*self.decodes, *self.chunks))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The spans of one step; their pages are reserved already."""

    spans: tuple[Span, ...]

    @property
    def num_prefill_rows(self) -> int:
        return sum([span.end - span.start for span in self.spans if not span.is_decode])

    @property
    def num_rebuild_rows(self) -> int:
        """Of the prefill rows, those below a full hit: their full KV is there, their windows are not."""
        return sum(
            [
                max(0, min(span.end, span.lease.full_hit) - span.start)
                for span in self.spans
                if not span.is_decode
            ]
        )

    @property
    def num_decode_rows(self) -> int:
        return sum([span.is_decode for span in self.spans])
