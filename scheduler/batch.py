"""From a plan to the model's input: flat arrays and a page table per kind."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.pages import PageIds, num_pages_for
from forkpoint.configs.staircase import Staircase
from forkpoint.model.inputs import Draw, ForwardInput, Kind, KindTable, ScoredRows
from forkpoint.scheduler.plan import Span, StepPlan
from forkpoint.scheduler.sequence import Sequence


def build_forward_input(
    plan: StepPlan, kinds: Collection[Kind], page_size: int, staircase: Staircase | None = None
) -> ForwardInput:
    """The ragged batch of a plan. Rows below a full hit get page 0 as their place for full KV.

    staircase: how rows below a full hit run; None: in all layers.
    """
    spans = plan.spans
    lengths = np.array([span.num_rows for span in spans], dtype=np.int32)
    q_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sampling = np.array([span.samples for span in spans], dtype=bool)
    return ForwardInput(
        token_ids=np.concatenate([span.sequence.tokens[span.start : span.end] for span in spans]),
        positions=np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans]),
        q_indptr=q_indptr,
        full_hits=np.array([span.lease.full_hit for span in spans], dtype=np.int32),
        tables={kind: _table(spans, kind, page_size) for kind in kinds},
        sample_rows=(q_indptr[1:] - 1)[sampling].astype(np.int64),
        first_rows=_first_rows(spans, staircase),
        scored=_scored_rows(spans, q_indptr),
    )


def draws_of(plan: StepPlan) -> list[Draw]:
    """How to sample each row of `sample_rows`."""
    return [_draw_of(span.sequence) for span in plan.spans if span.samples]


def _draw_of(sequence: Sequence) -> Draw:
    constraint = sequence.constraint
    may_end = sequence.num_generated >= sequence.params.min_tokens
    return Draw(
        sequence.params,
        sequence.choice,
        sequence.num_tokens,
        token_ids=sequence.tokens,
        prompt_len=sequence.prompt_len,
        mask=None if constraint is None else constraint.mask(may_end=may_end),
    )


def _scored_rows(spans: tuple[Span, ...], q_indptr: NDArray[np.int32]) -> ScoredRows | None:
    scoring = [index for index, span in enumerate(spans) if span.scored]
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
    if staircase is None or all(span.start >= span.lease.full_hit for span in spans):
        return None
    first_rows = np.zeros((staircase.num_layers + 1, len(spans)), dtype=np.int32)
    for index, span in enumerate(spans):
        if span.start < span.lease.full_hit:
            first_rows[:, index] = staircase.first_rows(span.lease.full_hit, span.lease.resume)
    return first_rows


def _table(spans: tuple[Span, ...], kind: Kind, page_size: int) -> KindTable:
    listed = [_listed_pages(span, kind, page_size) for span in spans]
    ends = np.array([span.end for span in spans], dtype=np.int32)
    first_pages = np.array([_first_page(span, kind) for span in spans], dtype=np.int32)
    return KindTable(
        kv_indptr=np.concatenate([[0], np.cumsum([len(pages) for pages in listed])]).astype(np.int32),
        kv_pages=np.concatenate(listed),
        first_position=first_pages * page_size,
        last_page_len=(ends - 1) % page_size + 1,
        lowest_key=np.maximum(
            np.array([_lowest_key(span, kind) for span in spans], dtype=np.int32), first_pages * page_size
        ),
        write_slots=np.concatenate(
            [_write_slots(span, pages, kind, page_size) for span, pages in zip(spans, listed, strict=True)]
        ),
    )


def _listed_pages(span: Span, kind: Kind, page_size: int) -> PageIds:
    num_pages = num_pages_for(span.end, page_size)
    return span.lease.full_table(num_pages) if kind == "full" else span.lease.swa_table(num_pages)


def _first_page(span: Span, kind: Kind) -> int:
    return 0 if kind == "full" else span.lease.first_swa


def _lowest_key(span: Span, kind: Kind) -> int:
    """A rebuild that starts in mid-page has strangers' state below it in that page."""
    lease = span.lease
    return lease.start if kind == "swa" and lease.start > lease.resume else 0


def _write_slots(span: Span, pages: PageIds, kind: Kind, page_size: int) -> NDArray[np.int64]:
    positions = np.arange(span.start, span.end, dtype=np.int64)
    written = pages[positions // page_size - _first_page(span, kind)].astype(np.int64)
    if kind == "full":
        written[: max(0, span.lease.full_hit - span.start)] = 0
    return written * page_size + positions % page_size
