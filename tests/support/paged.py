"""Pages and page tables for tests of the model alone: sequences that share, drop and poison pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forkpoint.model.inputs import ForwardInput, Kind, KindTable
from forkpoint.model.runner import ModelRunner

DROPPED = -1


@dataclass
class PagedSequence:
    """A sequence that grows by steps; mutable, owned by its PagedWorld.

    pages: per kind the page of each page number, or DROPPED. full_hit: rows below it write no full KV.
    """

    token_ids: list[int]
    pages: dict[Kind, list[int]]
    num_computed: int = 0
    full_hit: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class PagedWorld:
    """Hands out pages of a runner's pools and runs ragged steps on it."""

    def __init__(self, runner: ModelRunner, page_size: int) -> None:
        self._runner = runner
        self._page_size = page_size
        # Scattered on purpose: neighbours in a sequence must not be neighbours in the pool.
        rng = np.random.default_rng(0)
        self._free = {
            kind: list(rng.permutation(np.arange(1, count))) for kind, count in runner.pools.num_pages.items()
        }

    def sequence(self, token_ids: Sequence[int]) -> PagedSequence:
        return PagedSequence(list(token_ids), {kind: [] for kind in self._runner.config.kinds})

    def fork(
        self, source: PagedSequence, token_ids: Sequence[int], *, start: int, full_hit: int
    ) -> PagedSequence:
        """A sequence that reuses source's KV: full up to full_hit, SWA up to start; both multiples of P.

        It computes from start on; rows in [start, full_hit) are gap rows.
        """
        assert start % self._page_size == 0 and full_hit % self._page_size == 0
        assert list(token_ids[:full_hit]) == source.token_ids[:full_hit]
        upto: dict[Kind, int] = {"full": full_hit, "swa": start}
        pages = {kind: source.pages[kind][: upto[kind] // self._page_size] for kind in source.pages}
        return PagedSequence(list(token_ids), pages, num_computed=start, full_hit=full_hit)

    def step(self, batch: Sequence[tuple[PagedSequence, int]]) -> None:
        """Run the next `num_rows` rows of each sequence as one batch; appends the logits of every row."""
        logits = self._runner.logits(self.inputs(batch))
        for (sequence, num_rows), rows in zip(batch, torch.split(logits, [n for _, n in batch]), strict=True):
            sequence.num_computed += num_rows
            sequence.logits.append(rows)

    def inputs(self, batch: Sequence[tuple[PagedSequence, int]]) -> ForwardInput:
        """The batch's ForwardInput, every row sampled; takes the pages that its rows need."""
        spans = [(s, s.num_computed, s.num_computed + num_rows) for s, num_rows in batch]
        token_ids = [token for s, start, end in spans for token in s.token_ids[start:end]]
        positions = [position for _, start, end in spans for position in range(start, end)]
        return ForwardInput(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            q_indptr=np.cumsum([0] + [end - start for _, start, end in spans], dtype=np.int32),
            full_hits=np.array([s.full_hit for s, _, _ in spans], dtype=np.int32),
            tables={kind: self._table(kind, spans) for kind in self._runner.config.kinds},
            sample_rows=np.arange(len(token_ids), dtype=np.int64),
        )

    def drop_out_of_window(
        self, sequence: PagedSequence, *, shared_with: Sequence[PagedSequence] = ()
    ) -> int:
        """Free the SWA pages that no later row can see and fill them with NaN. Returns how many."""
        window = self._runner.config.window
        if window is None:
            return 0
        live_from = max(0, sequence.num_computed - (window - 1))
        pages = sequence.pages["swa"]
        dropped = 0
        for number in range(min(live_from // self._page_size, len(pages))):
            page, pages[number] = pages[number], DROPPED
            if page != DROPPED and all(page not in other.pages["swa"] for other in shared_with):
                self.poison("swa", page)
                self._free["swa"].append(page)
                dropped += 1
        return dropped

    def poison(self, kind: Kind, page: int) -> None:
        """Fill a page with NaN in all layers of the kind."""
        for spec, layer in zip(self._runner.config.layers, self._runner.pools.layers, strict=True):
            if spec.kind == kind:
                layer.keys[page] = torch.nan
                layer.values[page] = torch.nan

    def poison_all(self) -> None:
        """Fill every page with NaN, page 0 too: what is read before it is written shows."""
        for kind, count in self._runner.pools.num_pages.items():
            for page in range(count):
                self.poison(kind, page)

    def _table(self, kind: Kind, spans: Sequence[tuple[PagedSequence, int, int]]) -> KindTable:
        size = self._page_size
        indptr, kv_pages, first_positions, last_lens, slots = [0], [], [], [], []
        for sequence, start, end in spans:
            pages = sequence.pages[kind]
            while len(pages) * size < end:
                pages.append(int(self._free[kind].pop()))
            num_dropped = next((i for i, page in enumerate(pages) if page != DROPPED), len(pages))
            # A gap row's sequence may hold full pages above this step's end; the table stops at the end.
            listed = pages[num_dropped : -(-end // size)]
            kv_pages += listed
            indptr.append(len(kv_pages))
            first_positions.append(num_dropped * size)
            last_lens.append((end - 1) % size + 1)
            for position in range(start, end):
                is_gap = kind == "full" and position < sequence.full_hit
                page = 0 if is_gap else pages[position // size]
                slots.append(page * size + position % size)
        return KindTable(
            kv_indptr=np.array(indptr, dtype=np.int32),
            kv_pages=np.array(kv_pages, dtype=np.int32),
            first_position=np.array(first_positions, dtype=np.int32),
            lowest_key=np.array(first_positions, dtype=np.int32),
            last_page_len=np.array(last_lens, dtype=np.int32),
            write_slots=np.array(slots, dtype=np.int64),
        )
