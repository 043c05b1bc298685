"""The checking runner: a model double whose KV slots say whose state they hold.

A slot's content is (hash of the true prefix up to its position, position), as real KV depends on it, and for
SWA in how many of the lowest layers it is right: the first rows of a rebuild are right in some only. Every
row reads back, through the page tables that it was given, each position that it may attend to, and fails on
the first stranger. Slot aliasing, use after free, a window freed one page early, a wrong branch insert and a
rebuilt row published too early then fail at the step that caused them, not as a strange word later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from support.staircase_oracle import run_span

from forkpoint.model.inputs import Draws, ForwardInput, Kind, KindTable
from forkpoint.model.outputs import StepOutput, TokenLogprobs


class StrangerState(AssertionError):
    """A row would read a slot that does not hold what its position says."""


def extend_hash(prefix: int, tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The rolling hash after each of `tokens`, which follow a prefix of hash `prefix`."""
    hashes = np.empty(len(tokens), dtype=np.uint64)
    value = prefix
    for index, token in enumerate(tokens.tolist()):
        value = ((value ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        hashes[index] = value
    return hashes


class CheckingRunner:
    """Checks every read of every step; the next token is a pure function of the true prefix.

    num_pages: per kind, page 0 included. window: W, counting the query.
    """

    def __init__(
        self,
        num_pages: dict[Kind, int],
        *,
        page_size: int,
        window: int | None,
        vocab_size: int,
        pattern: str = "SF",
    ) -> None:
        self._pattern = pattern
        self._right_layers = np.zeros(num_pages.get("swa", 0) * page_size, dtype=np.int64)
        self._page_size = page_size
        self._window = window
        self._vocab_size = vocab_size
        self._hashes = {kind: np.zeros(n * page_size, dtype=np.uint64) for kind, n in num_pages.items()}
        self._positions = {kind: np.full(n * page_size, -1, dtype=np.int64) for kind, n in num_pages.items()}
        # The hash before each full slot's position: a table is right only if each slot follows from the last.
        self._parents = np.zeros(num_pages["full"] * page_size, dtype=np.uint64)
        self.num_steps = 0
        self.failure: AssertionError | None = None

    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        try:
            return self._step(inputs, draws)
        except AssertionError as failure:
            self.failure = failure  # the engine turns what a step raises into an answer
            raise

    def _step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        self.num_steps += 1
        assert len(draws) == len(inputs.sample_rows)
        row_hashes = np.empty(inputs.num_rows, dtype=np.uint64)
        for index in range(inputs.num_sequences):
            self._run_sequence(inputs, index, row_hashes)
        self._check_writes(inputs)
        tokens = [next_token(int(row_hashes[row]), self._vocab_size) for row in inputs.sample_rows.tolist()]
        return StepOutput(
            np.array(tokens, dtype=np.int64),
            logprobs={
                index: _as_logprobs(row_hashes[row : row + 1], draw.params.num_logprobs)
                for index, (row, draw) in enumerate(zip(inputs.sample_rows.tolist(), draws, strict=True))
                if draw.params.num_logprobs is not None
            },
            scores=self._score(inputs, row_hashes),
        )

    def _score(self, inputs: ForwardInput, row_hashes: NDArray[np.uint64]) -> TokenLogprobs | None:
        """A score tells the prefix and the token that it belongs to, by expected_scores()."""
        scored = inputs.scored
        if scored is None:
            return None
        assert not np.isin(scored.rows, inputs.sample_rows).any(), "a row is sampled or scored, not both"
        prefixes = row_hashes[scored.rows].tolist()
        hashes = [
            int(extend_hash(prefix, scored.token_ids[i : i + 1])[0]) for i, prefix in enumerate(prefixes)
        ]
        return _as_logprobs(np.array(hashes, dtype=np.uint64), scored.num_top)

    def _run_sequence(self, inputs: ForwardInput, index: int, row_hashes: NDArray[np.uint64]) -> None:
        rows = slice(int(inputs.q_indptr[index]), int(inputs.q_indptr[index + 1]))
        positions = inputs.positions[rows].astype(np.int64)
        start, end = int(positions[0]), int(positions[-1]) + 1
        assert np.array_equal(positions, np.arange(start, end)), "positions of a sequence are consecutive"
        slots = {kind: self._slots(table, index) for kind, table in inputs.tables.items()}

        prefix = int(self._hashes["full"][slots["full"][1][start - 1]]) if start else 0
        hashes = extend_hash(prefix, inputs.token_ids[rows])
        row_hashes[rows] = hashes
        if "swa" in inputs.tables:
            self._run_layers(inputs, index, start, end)
        full_hit = int(inputs.full_hits[index])
        for kind, table in inputs.tables.items():
            first, of_position = slots[kind]
            assert first + len(of_position) == end, f"{kind}: the table must end with the span"
            writes = table.write_slots[rows]
            is_gap = (positions < full_hit) if kind == "full" else np.zeros(len(positions), dtype=bool)
            assert (writes[is_gap] < self._page_size).all(), "gap rows must not write full state"
            expected = of_position[positions[~is_gap] - first]
            assert np.array_equal(writes[~is_gap], expected), f"{kind}: rows are written where they are read"
            # Rows below a full hit find the true state in the tree's page already: check, do not write.
            self._expect(kind, of_position[positions[is_gap] - first], hashes[is_gap], positions[is_gap])
            self._hashes[kind][writes[~is_gap]] = hashes[~is_gap]
            self._positions[kind][writes[~is_gap]] = positions[~is_gap]
            if kind == "full":
                parents = np.concatenate([np.array([prefix], dtype=np.uint64), hashes[:-1]])
                self._parents[writes[~is_gap]] = parents[~is_gap]
        first, full_slots = slots["full"]
        assert first == 0, "full attention reads from position 0"
        self._check_chain(full_slots)

    def _slots(self, table: KindTable, index: int) -> tuple[int, NDArray[np.int64]]:
        """(first position listed, slot of each listed position)."""
        size = self._page_size
        pages = table.kv_pages[table.kv_indptr[index] : table.kv_indptr[index + 1]].astype(np.int64)
        assert (pages > 0).all(), "page 0 must never be read"
        count = (len(pages) - 1) * size + int(table.last_page_len[index])
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)[:count]
        return int(table.first_position[index]), slots

    def _run_layers(self, inputs: ForwardInput, index: int, start: int, end: int) -> None:
        """Follow the span through the layers; rows from the full hit on must come out right."""
        table = inputs.tables["swa"]
        first, slots = self._slots(table, index)
        _, full_slots = self._slots(inputs.tables["full"], index)
        lowest = max(int(table.lowest_key[index]), start - (self._window or 0) + 1)
        before = np.arange(lowest, start)
        stored_slots = slots[before - first]
        true_hashes = self._hashes["full"][full_slots[before]]
        is_own = (self._hashes["swa"][stored_slots] == true_hashes) & (
            self._positions["swa"][stored_slots] == before
        )
        stored = np.where(is_own, self._right_layers[stored_slots], 0)
        first_rows = None if inputs.first_rows is None else inputs.first_rows[:, index].tolist()
        right_layers, is_right = run_span(self._pattern, self._window, first_rows, start, end, stored)
        wrong = np.flatnonzero(~is_right & (np.arange(start, end) >= int(inputs.full_hits[index])))
        if len(wrong):
            raise StrangerState(
                f"swa: row {start + int(wrong[0])} of a span {start}..{end} reads state that is not right in "
                f"its layer; the table lists from {first}, keys from {int(table.lowest_key[index])}"
            )
        rows = slice(int(inputs.q_indptr[index]), int(inputs.q_indptr[index + 1]))
        self._right_layers[table.write_slots[rows]] = right_layers

    def _check_chain(self, slots: NDArray[np.int64]) -> None:
        positions = self._positions["full"][slots]
        wrong = positions != np.arange(len(slots))
        wrong[1:] |= self._parents[slots[1:]] != self._hashes["full"][slots[:-1]]
        if wrong.any():
            where = int(np.flatnonzero(wrong)[0])
            raise StrangerState(
                f"full: position {where} reads a slot of position {int(positions[where])}, or of a stranger"
            )

    def _expect(
        self, kind: Kind, slots: NDArray[np.int64], hashes: NDArray[np.uint64], positions: NDArray[np.int64]
    ) -> None:
        is_wrong = (self._hashes[kind][slots] != hashes) | (self._positions[kind][slots] != positions)
        if is_wrong.any():
            where = int(np.flatnonzero(is_wrong)[0])
            raise StrangerState(
                f"{kind}: position {int(positions[where])} reads slot {int(slots[where])}, which holds "
                f"position {int(self._positions[kind][slots[where]])} of another or older prefix"
            )

    def _check_writes(self, inputs: ForwardInput) -> None:
        for kind, table in inputs.tables.items():
            writes = table.write_slots[table.write_slots >= self._page_size]
            assert len(np.unique(writes)) == len(writes), f"{kind}: two rows write one slot"


def next_token(prefix_hash: int, vocab_size: int) -> int:
    return (prefix_hash >> 33) % vocab_size


def expected_continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What a sequence must generate, whatever its neighbours and the cache did."""
    value = int(extend_hash(0, np.array(prompt, dtype=np.int32))[-1])
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(value, vocab_size))
        value = int(extend_hash(value, np.array(tokens[-1:], dtype=np.int32))[0])
    return tokens


def expected_scores(prompt: list[int]) -> list[float]:
    """What each prompt token from position 1 on must score, whatever chunks, cache and retraction did."""
    hashes = extend_hash(0, np.array(prompt, dtype=np.int32))[1:]
    return [float(score) for score in _as_logprobs(hashes, 0).token_logprobs]


def _as_logprobs(hashes: NDArray[np.uint64], num_top: int) -> TokenLogprobs:
    scores = -(hashes % np.uint64(1 << 20)).astype(np.float32)
    ids = np.broadcast_to(np.arange(num_top, dtype=np.int32), (len(hashes), num_top))
    return TokenLogprobs(scores, ids, np.repeat(scores[:, None], num_top, axis=1))
