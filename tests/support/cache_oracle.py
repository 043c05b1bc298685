"""A brute-force picture of the cache: what is live, by definition, and what each page must hold.

Slow and plain on purpose. Content of a page is the tuple of (true prefix up to the position) for each slot,
as a real model's KV would depend on it; reading back through a lease's tables must give exactly that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from support.staircase_oracle import run_span

from forkpoint.cache import CacheGeometry, Lease, PrefixCache
from forkpoint.configs.staircase import Staircase

Tokens = NDArray[np.int32]


def expected_match(
    dump: list[tuple[str, list[int], list[bool]]], tokens: list[int], namespace: str, geometry: CacheGeometry
) -> tuple[int, int]:
    """(F, R) straight from their definitions, over the root-to-leaf prefixes of a dump."""
    size, limit = geometry.page_size, len(tokens) - 1
    full, live = 0, [False] * 0
    for name, prefix, swa in dump:
        if name != namespace:
            continue
        shared = 0
        while shared < min(len(prefix), limit) and prefix[shared] == tokens[shared]:
            shared += 1
        shared -= shared % size
        if shared >= full:
            full, live = shared, [swa[position // size] for position in range(shared)]
    if geometry.window is None:
        return full, full
    for resume in range(full, -1, -size):
        if all(live[max(0, resume - (geometry.window - 1)) : resume]):
            return full, resume
    raise AssertionError("0 is always legal")


class PageMemory:
    """What each slot of each kind holds: the hash of the true prefix that ends there.

    For SWA also in how many of the lowest layers it is right: the rows of a rebuild begin partly wrong.
    """

    def __init__(self, geometry: CacheGeometry, pattern: str, staircase: Staircase | None) -> None:
        self._size = geometry.page_size
        self._window = geometry.window
        self._pattern = pattern
        self._staircase = staircase
        self._slots: dict[str, dict[int, int]] = {"full": {}, "swa": {}}
        self._right_layers: dict[int, int] = {}

    def compute(self, lease: Lease, tokens: Tokens, start: int, end: int) -> None:
        """Run rows start..end: check everything they read, then write what they must."""
        right_layers = self._run(lease, tokens, start, end)
        for position in range(start, end):
            self._check(lease, "full", tokens, 0, position)
            value = _prefix_hash(lease.namespace, tokens, position)
            if position >= lease.full_hit:
                self._slots["full"][self._slot(lease, "full", position)] = value
            if self._window is not None:
                slot = self._slot(lease, "swa", position)
                self._slots["swa"][slot] = value
                self._right_layers[slot] = int(right_layers[position - start])

    def _run(self, lease: Lease, tokens: Tokens, start: int, end: int) -> NDArray[np.int64]:
        """In how many layers each row is right; rows from the full hit on must be right in all."""
        if self._window is None:
            return np.zeros(end - start, dtype=np.int64)
        first_rows = None
        if self._staircase is not None and lease.branch_point is not None:
            first_rows = self._staircase.first_rows(lease.full_hit, lease.resume)
        lowest = max(lease.first_swa * self._size, start - self._window + 1)
        stored = [self._layers_of(lease, tokens, position) for position in range(lowest, start)]
        right_layers, is_right = run_span(
            self._pattern, self._window, first_rows, start, end, np.array(stored, dtype=np.int64)
        )
        new = np.arange(start, end) >= lease.full_hit
        assert is_right[new].all(), "a new row read SWA state that was not right in its layer"
        return right_layers

    def _layers_of(self, lease: Lease, tokens: Tokens, position: int) -> int:
        slot = self._slot(lease, "swa", position)
        if self._slots["swa"].get(slot) != _prefix_hash(lease.namespace, tokens, position):
            return 0
        return self._right_layers[slot]

    def check_window(self, lease: Lease, tokens: Tokens, num_computed: int) -> None:
        """Every position that the next row may read holds what it should, in all layers past the full hit."""
        self._check(lease, "full", tokens, 0, max(num_computed, lease.full_hit))
        if self._window is None or num_computed < lease.full_hit:
            return
        first = max(0, num_computed - self._window + 1)
        self._check(lease, "swa", tokens, first, num_computed)
        for position in range(first, num_computed):
            layers = self._layers_of(lease, tokens, position)
            assert layers >= self._num_swa_depth, f"swa: position {position} is right in {layers} layers only"

    @property
    def _num_swa_depth(self) -> int:
        """Layers up to and with the topmost SWA layer: what is above has no SWA state."""
        return self._pattern.rindex("S") + 1

    def _check(self, lease: Lease, kind: str, tokens: Tokens, start: int, end: int) -> None:
        for position in range(start, end):
            held = self._slots[kind].get(self._slot(lease, kind, position))
            expected = _prefix_hash(lease.namespace, tokens, position)
            assert held == expected, f"{kind}: position {position} of {len(tokens)} holds a stranger's state"

    def _slot(self, lease: Lease, kind: str, position: int) -> int:
        row = lease.full_pages if kind == "full" else lease.swa_pages
        index = position // self._size
        page = int(row[index : index + 1][0])
        assert page != 0, f"{kind}: position {position} has no page"
        return page * self._size + position % self._size


def _prefix_hash(namespace: str, tokens: Tokens, position: int) -> int:
    return hash((namespace, tokens[: position + 1].tobytes()))


def assert_matches_oracle(cache: PrefixCache, tokens: Tokens, namespace: str) -> None:
    match = cache.match(tokens, namespace)
    expected = expected_match(cache.dump(), [int(token) for token in tokens], namespace, cache.geometry)
    assert (match.full_len, match.resume_len) == expected
