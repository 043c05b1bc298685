"""From a plan to the model's input: flat arrays and a page table per kind.

Whatever can be done for all sequences at once is one array operation; what each sequence must be asked is
asked in one pass. tests/support/batch_oracle.py does it span by span.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache import Lease
from forkpoint.configs.staircase import Staircase
from forkpoint.model.inputs import Draw, ForwardInput, Kind, KindTable, ScoredRows
from forkpoint.scheduler.plan import Span, StepPlan
from forkpoint.scheduler.sequence import Sequence

Ints = NDArray[np.int32]


def build_forward_input(
    plan: StepPlan, kinds: Collection[Kind], page_size: int, staircase: Staircase | None = None
) -> ForwardInput:
    """The ragged batch of a plan. Rows below a full hit get page 0 as their place for full KV.

    staircase: how rows below a full hit run; None: in all layers.
    """
    spans = plan.spans
    rows = _Rows.of(spans, page_size)
    sampling = [index for index, span in enumerate(spans) if span.samples]
    last_rows = rows.q_indptr[1:] - 1
    return ForwardInput(
        token_ids=np.concatenate([span.sequence.slice(span.start, span.end) for span in spans]),
        positions=rows.positions,
        q_indptr=rows.q_indptr,
        full_hits=rows.full_hits,
        tables={kind: rows.table(kind) for kind in kinds},
        sample_rows=(last_rows if len(sampling) == len(spans) else last_rows[sampling]).astype(np.int64),
        first_rows=_first_rows(spans, staircase),
        scored=_scored_rows(spans, rows.q_indptr),
    )


def draws_of(plan: StepPlan) -> list[Draw]:
    """How to sample each row of `sample_rows`."""
    return [_draw_of(span.sequence) for span in plan.spans if span.samples]


def _draw_of(sequence: Sequence) -> Draw:
    constraint = sequence.constraint
    mask = None
    if constraint is not None:
        mask = constraint.mask(may_end=sequence.num_generated >= sequence.params.min_tokens)
    num_tokens = sequence.num_tokens
    tokens = sequence.slice(0, num_tokens)
    return Draw(sequence.params, sequence.choice, num_tokens, tokens, sequence.prompt_len, mask)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step in arrays, of which tables are made. B sequences, T rows.

    lengths, full_hits, last_page_len: [B]. page_ends: how many pages the positions up to each end take.
    positions, page_indices, offsets: [T]; a position is page_indices * page_size + offsets.
    has_hit_rows: whether some rows lie below their sequence's full hit.
    """

    leases: list[Lease]
    page_size: int
    lengths: Ints
    q_indptr: Ints
    full_hits: Ints
    last_page_len: Ints
    page_ends: list[int]
    positions: Ints
    page_indices: Ints
    offsets: Ints
    has_hit_rows: bool

    @staticmethod
    def of(spans: tuple[Span, ...], page_size: int) -> _Rows:
        leases = [span.lease for span in spans]
        starts = np.array([span.start for span in spans], dtype=np.int32)
        ends = np.array([span.end for span in spans], dtype=np.int32)
        full_hits = np.array([lease.full_hit for lease in leases], dtype=np.int32)
        lengths = ends - starts
        q_indptr = _indptr(lengths)
        if len(spans) == q_indptr[-1]:
            positions = starts
        else:
            positions = np.repeat(starts - q_indptr[:-1], lengths)
            positions += np.arange(len(positions), dtype=np.int32)
        page_indices, offsets = np.divmod(positions, np.int32(page_size))
        last_pages, before_last = np.divmod(ends - 1, np.int32(page_size))
        return _Rows(
            leases,
            page_size,
            lengths=lengths,
            q_indptr=q_indptr,
            full_hits=full_hits,
            last_page_len=before_last + 1,
            page_ends=(last_pages + 1).tolist(),
            positions=positions,
            page_indices=page_indices,
            offsets=offsets,
            has_hit_rows=bool((starts < full_hits).any()),
        )

    def table(self, kind: Kind) -> KindTable:
        leases = self.leases
        if kind == "full":
            listed = [lease.full_table(end) for lease, end in zip(leases, self.page_ends, strict=True)]
            first_pages = np.zeros(len(leases), dtype=np.int32)
            lowest_key = first_pages
        else:
            listed = [lease.swa_table(end) for lease, end in zip(leases, self.page_ends, strict=True)]
            first_pages = np.array([lease.first_swa for lease in leases], dtype=np.int32)
            lowest_key = np.array([_lowest_key(lease) for lease in leases], dtype=np.int32)
        kv_indptr = _indptr(np.array(list(map(len, listed)), dtype=np.int32))
        kv_pages = np.concatenate(listed)
        first_position = first_pages * np.int32(self.page_size)
        return KindTable(
            kv_indptr=kv_indptr,
            kv_pages=kv_pages,
            first_position=first_position,
            last_page_len=self.last_page_len,
            lowest_key=np.maximum(lowest_key, first_position),
            write_slots=self._write_slots(kind, kv_pages, kv_indptr[:-1] - first_pages),
        )

    def _write_slots(self, kind: Kind, kv_pages: Ints, origins: Ints) -> NDArray[np.int64]:
        """origins: [B] where page 0 of each sequence lies in kv_pages, or would lie if it were listed."""
        slots: NDArray[np.int64] = kv_pages[self.page_indices + self._per_row(origins)].astype(np.int64)
        if kind == "full" and self.has_hit_rows:
            slots[self.positions < self._per_row(self.full_hits)] = 0
        slots *= self.page_size
        slots += self.offsets
        return slots

    def _per_row(self, values: Ints) -> Ints:
        """A value of each sequence, for each of its rows."""
        return values if len(values) == len(self.positions) else np.repeat(values, self.lengths)


def _indptr(lengths: Ints) -> Ints:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def _lowest_key(lease: Lease) -> int:
    """A rebuild that starts in mid-page has strangers' state below it in that page."""
    return lease.start if lease.start > lease.resume else 0


def _scored_rows(spans: tuple[Span, ...], q_indptr: Ints) -> ScoredRows | None:
    scoring = [index for index, span in enumerate(spans) if not span.is_decode and span.scored]
    if not scoring:
        return None
    rows, token_ids = [], []
    for index in scoring:
        span, scored = spans[index], spans[index].scored
        first = int(q_indptr[index]) + scored.start - span.start
        rows.append(np.arange(first, first + len(scored), dtype=np.int64))
        token_ids.append(span.sequence.tokens[scored.start + 1 : scored.stop + 1])
    num_top = max(spans[index].sequence.params.num_logprobs or 0 for index in scoring)
    return ScoredRows(np.concatenate(rows), np.concatenate(token_ids), num_top)


def _first_rows(spans: tuple[Span, ...], staircase: Staircase | None) -> NDArray[np.int32] | None:
    if staircase is None or all(span.is_decode or span.start >= span.lease.full_hit for span in spans):
        return None
    first_rows = np.zeros((staircase.num_layers + 1, len(spans)), dtype=np.int32)
    for index, span in enumerate(spans):
        if span.start < span.lease.full_hit:
            first_rows[:, index] = staircase.first_rows(span.lease.full_hit, span.lease.resume)
    return first_rows
