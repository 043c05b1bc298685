"""A step's input made span by span, as one would explain it: what scheduler/batch.py must agree with."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.pages import PageIds, num_pages_for
from forkpoint.model.inputs import ForwardInput, Kind, KindTable
from forkpoint.scheduler.plan import Span, StepPlan


def oracle_forward_input(plan: StepPlan, kinds: Collection[Kind], page_size: int) -> ForwardInput:
    """As build_forward_input, without first_rows and scored rows."""
    spans = plan.spans
    lengths = np.array([span.num_rows for span in spans], dtype=np.int32)
    q_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sampling = np.array([_samples(span) for span in spans], dtype=bool)
    return ForwardInput(
        token_ids=np.concatenate([span.sequence.tokens[span.start : span.end] for span in spans]),
        positions=np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans]),
        q_indptr=q_indptr,
        full_hits=np.array([span.lease.full_hit for span in spans], dtype=np.int32),
        tables={kind: _table(spans, kind, page_size) for kind in kinds},
        sample_rows=(q_indptr[1:] - 1)[sampling].astype(np.int64),
    )


def _samples(span: Span) -> bool:
    return span.end == span.sequence.num_tokens and span.sequence.num_tokens_left > 0


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
