"""Steps of one sequence, for tests of what happens to its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forkpoint.model.inputs import ForwardInput, Kind, KindTable


def one_chunk(count: int, start: int, write_slots: NDArray[np.int64]) -> ForwardInput:
    """Rows at positions [start, start + count) of a model with full attention."""
    table = KindTable(
        kv_indptr=np.array([0, 1], dtype=np.int32),
        kv_pages=np.zeros(1, dtype=np.int32),
        first_position=np.zeros(1, dtype=np.int32),
        last_page_len=np.ones(1, dtype=np.int32),
        lowest_key=np.zeros(1, dtype=np.int32),
        write_slots=write_slots,
    )
    return ForwardInput(
        token_ids=np.zeros(count, dtype=np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        q_indptr=np.array([0, count], dtype=np.int32),
        full_hits=np.zeros(1, dtype=np.int32),
        tables={"full": table},
        sample_rows=np.array([count - 1], dtype=np.int64),
    )


def whole_prompt(tokens: list[int], kinds: tuple[Kind, ...], page_size: int) -> ForwardInput:
    """A prompt from its start, in pages 1, 2, ... of each kind; its first and last rows are wanted."""
    count = len(tokens)
    pages = np.arange(1, 1 + -(-count // page_size), dtype=np.int32)
    table = KindTable(
        kv_indptr=np.array([0, len(pages)], dtype=np.int32),
        kv_pages=pages,
        first_position=np.zeros(1, dtype=np.int32),
        last_page_len=np.array([count - (len(pages) - 1) * page_size], dtype=np.int32),
        lowest_key=np.zeros(1, dtype=np.int32),
        write_slots=page_size + np.arange(count, dtype=np.int64),
    )
    return ForwardInput(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        q_indptr=np.array([0, count], dtype=np.int32),
        full_hits=np.zeros(1, dtype=np.int32),
        tables=dict.fromkeys(kinds, table),
        sample_rows=np.array([0, count - 1], dtype=np.int64),
    )
