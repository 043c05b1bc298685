"""A brute-force picture of the cache: what is live, by definition, and what each page must hold.

Slow and plain on purpose. Content of a page is the tuple of (true prefix up to the position) for each slot,
as a real model's KV would depend on it; reading back through a lease's tables must give exactly that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache import CacheGeometry, Lease, PrefixCache

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
    """What each slot of each kind holds: the hash of the true prefix that ends there."""

    def __init__(self, geometry: CacheGeometry, namespace_of: dict[int, str] | None = None) -> None:
        self._size = geometry.page_size
        self._window = geometry.window
        self._slots: dict[str, dict[int, int]] = {"full": {}, "swa": {}}

    def compute(self, lease: Lease, tokens: Tokens, start: int, end: int) -> None:
        """Run rows start..end: check everything they read, then write what they must."""
        for position in range(start, end):
            self._check_reads(lease, tokens, position)
            value = _prefix_hash(lease.namespace, tokens, position)
            if position >= lease.full_hit:
                self._slots["full"][self._slot(lease, "full", position)] = value
            if self._window is not None:
                self._slots["swa"][self._slot(lease, "swa", position)] = value

    def check_window(self, lease: Lease, tokens: Tokens, num_computed: int) -> None:
        """Every position that the next row may read holds what it should."""
        self._check_reads(lease, tokens, num_computed)

    def _check_reads(self, lease: Lease, tokens: Tokens, position: int) -> None:
        self._check(lease, "full", tokens, 0, position)
        if self._window is not None:
            self._check(lease, "swa", tokens, max(0, position - self._window + 1), position)

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
