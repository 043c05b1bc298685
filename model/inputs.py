"""What one step of the model is given: rows of many sequences as one ragged batch, and where their KV lies.

Three intervals of a sequence's positions matter in a step; all are half open:

    0 ........ start ........ full_hit ........ end
               [ rows of this step               )
               [ gap rows        )                    read full KV of the tree, write none (page 0 instead)
                                 [ new rows      )    write KV of both kinds

Most sequences have full_hit <= start: no gap rows. In a rebuild, gap rows run in a staircase of layers
(configs/staircase.py): layer l computes K and V on rows from first_rows[l] on, attention and MLP on rows
from first_rows[l+1] on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forkpoint.configs.sampling import SamplingParams

Kind = Literal["full", "swa"]
KINDS: tuple[Kind, ...] = ("full", "swa")
_NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class KindTable:
    """Where one kind's KV of each sequence lies, in FlashInfer's paged layout. P is the page size.

    kv_indptr: [B+1] int32, sequence b owns kv_pages[kv_indptr[b]:kv_indptr[b+1]].
    kv_pages: [N] int32 page ids in order of position.
    first_position: [B] int32, position of the first slot of the first listed page; a multiple of P.
        0 for the full kind; for SWA the lowest position that is still kept.
    last_page_len: [B] int32, slots used in the last page, 1..P: the listed KV ends at the span's end.
    lowest_key: [B] int32, positions below it hold nothing of this sequence and must not be read, though
        their page may be listed; >= first_position, and equal to it but for rebuilds.
    write_slots: [T] int64, slot (page * P + offset) that each row's K and V are written to. Rows that must
        not write point into page 0, which is never read.

    Position p of sequence b lies in slot
    kv_pages[kv_indptr[b] + (p - first_position[b]) // P] * P + p % P.
    """

    kv_indptr: NDArray[np.int32]
    kv_pages: NDArray[np.int32]
    first_position: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    lowest_key: NDArray[np.int32]
    write_slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a batch whose next token is known, and is to be scored.

    rows: [N] int64, none of them sampled. token_ids: [N] int32, what follows each.
    num_top: how many of the most likely tokens are wanted with each.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    num_top: int


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One ragged batch: prefill chunks and decode rows of B sequences, T rows in all.

    token_ids: [T] int32. positions: [T] int32, consecutive within a sequence.
    q_indptr: [B+1] int32, rows of sequence b are q_indptr[b]:q_indptr[b+1].
    full_hits: [B] int32; rows at positions below it read full KV but do not write it.
    tables: one KindTable for each kind that the model has.
    sample_rows: [S] int64, the rows whose logits are wanted (the last row of some sequences).
    first_rows: [L+1, B] int32, a[l] of each sequence, 0 where it does not rebuild; None when none does.
    scored: rows to score beside those; None when there are none.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    q_indptr: NDArray[np.int32]
    full_hits: NDArray[np.int32]
    tables: Mapping[Kind, KindTable]
    sample_rows: NDArray[np.int64]
    first_rows: NDArray[np.int32] | None = None
    scored: ScoredRows | None = None

    @property
    def output_rows(self) -> NDArray[np.int64]:
        """[S + N] sample_rows, then the scored rows: all whose final hidden state is wanted."""
        if self.scored is None:
            return self.sample_rows
        return np.concatenate([self.sample_rows, self.scored.rows])

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.q_indptr) - 1


class Draw(NamedTuple):
    """How to choose one token: row i of `sample_rows` uses draws[i].

    position: index of the new token in its sequence. The random number is a pure function of
    (params.seed, choice, position), so neighbours and batch order cannot change it.
    token_ids: [position] int32, prompt and output so far, of which the first prompt_len are the prompt; only
    penalties and min_tokens ask for them. A view into the sequence, valid during the step.
    mask: [ceil(V / 32)] int32, bit t % 32 of mask[t // 32] says whether token t may be chosen; None: all may.

    A tuple, since one is made for each sampled token: a frozen dataclass takes three times as long to make.
    """

    params: SamplingParams
    choice: int
    position: int
    token_ids: NDArray[np.int32] = _NO_TOKENS
    prompt_len: int = 0
    mask: NDArray[np.int32] | None = None

    @property
    def num_generated(self) -> int:
        return self.position - self.prompt_len


Draws = Sequence[Draw]
