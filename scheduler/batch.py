"""From a plan to the model's input: flat arrays and a page table per kind."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from forkpoint.cache.pages import PageIds, num_pages_for
from forkpoint.model.inputs import Draw, ForwardInput, Kind, KindTable
from forkpoint.scheduler.plan import Span, StepPlan


def build_forward_input(plan: StepPlan, kinds: Collection[Kind], page_size: int) -> ForwardInput:
    """The ragged batch of a plan. Rows below a full hit get page 0 as their place for full KV."""
    spans = plan.spans
    lengths = np.array([span.num_rows for span in spans], dtype=np.int32)
    q_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sampling = np.array([span.samples for span in spans], dtype=bool)
    positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans])
    tables: dict[Kind, KindTable] = {}
    if "full" in kinds:
        tables["full"] = _table(
            spans, page_size, _full_pages, np.zeros(len(spans), dtype=np.int32), _first_full_write
        )
    if "swa" in kinds:
        first = np.array([span.lease.first_swa for span in spans], dtype=np.int32)
        tables["swa"] = _table(spans, page_size, _swa_pages, first, _first_swa_write)
    return ForwardInput(
        token_ids=np.concatenate([span.sequence.tokens[span.start : span.end] for span in spans]),
        positions=positions,
        q_indptr=q_indptr,
        full_hits=np.array([span.lease.full_hit for span in spans], dtype=np.int32),
        tables=tables,
        sample_rows=(q_indptr[1:] - 1)[sampling].astype(np.int64),
    )


def draws_of(plan: StepPlan) -> list[Draw]:
    """How to sample each row of `sample_rows`."""
    return [
        Draw(span.sequence.params, span.sequence.choice, span.sequence.num_tokens)
        for span in plan.spans
        if span.samples
    ]


def _full_pages(span: Span, num_pages: int) -> PageIds:
    return span.lease.full_table(num_pages)


def _swa_pages(span: Span, num_pages: int) -> PageIds:
    return span.lease.swa_table(num_pages)


def _first_full_write(span: Span) -> int:
    return min(max(span.start, span.lease.full_hit), span.end)


def _first_swa_write(span: Span) -> int:
    return span.start


def _table(
    spans: tuple[Span, ...],
    page_size: int,
    pages_of: Callable[[Span, int], PageIds],
    first_pages: PageIds,
    first_write: Callable[[Span], int],
) -> KindTable:
    tables = [pages_of(span, num_pages_for(span.end, page_size)) for span in spans]
    kv_indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32)
    ends = np.array([span.end for span in spans], dtype=np.int32)
    slots = []
    for span, table, first_page in zip(spans, tables, first_pages.tolist(), strict=True):
        positions = np.arange(span.start, span.end, dtype=np.int64)
        pages = table[positions // page_size - first_page].astype(np.int64)
        pages[: first_write(span) - span.start] = 0
        slots.append(pages * page_size + positions % page_size)
    return KindTable(
        kv_indptr=kv_indptr,
        kv_pages=np.concatenate(tables).astype(np.int32),
        first_position=(first_pages * page_size).astype(np.int32),
        last_page_len=((ends - 1) % page_size + 1).astype(np.int32),
        write_slots=np.concatenate(slots),
    )
