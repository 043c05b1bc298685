"""Drops the leading rows of a batch that a layer does not run, while a window is being rebuilt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forkpoint.model.inputs import ForwardInput, KindTable


def trim(
    inputs: ForwardInput, first_rows: NDArray[np.int32]
) -> tuple[ForwardInput, NDArray[np.int64]] | None:
    """The rows of `inputs` at positions from first_rows [B] on, and which rows those are, [T'] int64.

    Sequences that lose all their rows leave the batch. None when no row is dropped.
    """
    lengths = np.diff(inputs.q_indptr)
    sequence_of_row = np.repeat(np.arange(len(lengths)), lengths)
    is_kept = inputs.positions >= first_rows[sequence_of_row]
    if is_kept.all():
        return None
    kept = np.flatnonzero(is_kept)
    new_lengths = np.bincount(sequence_of_row[kept], minlength=len(lengths))
    stays = np.flatnonzero(new_lengths)
    new_row = np.cumsum(is_kept) - 1
    # Rows that are sampled or scored lie at or past the full hit: they are never dropped.
    scored = inputs.scored
    trimmed = replace(
        inputs,
        token_ids=inputs.token_ids[kept],
        positions=inputs.positions[kept],
        q_indptr=np.concatenate([[0], np.cumsum(new_lengths[stays])]).astype(np.int32),
        full_hits=inputs.full_hits[stays],
        tables={kind: _select(table, stays, kept) for kind, table in inputs.tables.items()},
        sample_rows=new_row[inputs.sample_rows].astype(np.int64),
        first_rows=None if inputs.first_rows is None else inputs.first_rows[:, stays],
        scored=None if scored is None else replace(scored, rows=new_row[scored.rows].astype(np.int64)),
    )
    return trimmed, kept


def _select(table: KindTable, stays: NDArray[np.int64], kept: NDArray[np.int64]) -> KindTable:
    starts, ends = table.kv_indptr[stays], table.kv_indptr[stays + 1]
    listed = [table.kv_pages[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return KindTable(
        kv_indptr=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
        kv_pages=np.concatenate([table.kv_pages[:0], *listed]),
        first_position=table.first_position[stays],
        last_page_len=table.last_page_len[stays],
        lowest_key=table.lowest_key[stays],
        write_slots=table.write_slots[kept],
    )
