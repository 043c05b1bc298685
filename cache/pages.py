"""Page ids of one kind of state: the free list, and rounding of token counts to pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]


class OutOfPages(Exception):
    """A pool cannot give as many pages as were asked for, even after eviction. `kind` names the pool."""

    def __init__(self, kind: str, wanted: int, available: int) -> None:
        super().__init__(f"{kind} pool: {wanted} pages wanted, {available} available")
        self.kind = kind
        self.wanted = wanted
        self.available = available


def page_floor(num_tokens: int, page_size: int) -> int:
    """The greatest multiple of page_size that is not above num_tokens."""
    return num_tokens - num_tokens % page_size


def page_ceil(num_tokens: int, page_size: int) -> int:
    """The least multiple of page_size that is not below num_tokens."""
    return -(-num_tokens // page_size) * page_size


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold num_tokens tokens."""
    return -(-num_tokens // page_size)


class PagePool:
    """Free list of page ids 1..capacity, last returned first out. Page 0 is never given: it is scratch.

    Mutable; num_free and num_taken are for others to read. num_taken: pages given out so far, ever; the clock
    by which cached state ages.
    """

    def __init__(self, kind: str, capacity: int) -> None:
        self.kind = kind
        self.capacity = capacity
        # Stack; the low ids lie on top so that a small load touches little memory.
        self._stack: PageIds = np.arange(capacity, 0, -1, dtype=np.int32)
        self.num_free = capacity
        self.num_taken = 0

    def take(self, count: int) -> PageIds:
        """`count` page ids, now owned by the caller. Raises OutOfPages and takes none if too few are free."""
        if count > self.num_free:
            raise OutOfPages(self.kind, count, self.num_free)
        self.num_free -= count
        self.num_taken += count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def give(self, pages: PageIds) -> None:
        """Return pages; the caller must own each of them exactly once."""
        count = len(pages)
        assert self.num_free + count <= self.capacity, f"{self.kind}: more pages returned than exist"
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count

    def free_pages(self) -> PageIds:
        """A copy of the free ids, for audits."""
        return self._stack[: self.num_free].copy()
