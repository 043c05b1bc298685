"""What one running sequence holds: pages borrowed from the tree, and pages of its own.

    full   0 ....................... published ................ num_full_pages
           [ borrowed: the tree's pages )[ owned               )
    swa    ... first_swa ........... swa_published ........... num_swa_pages
               [ borrowed, locked   )[ owned                  )

Units are pages. Below first_swa nothing is held. Only PrefixCache changes a lease.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.pages import PageIds
from forkpoint.cache.tree import Node


class PageRow:
    """Page ids by page index; grows at its end. Entries of freed pages are 0."""

    __slots__ = ("_pages", "length")

    def __init__(self) -> None:
        self._pages: PageIds = np.zeros(64, dtype=np.int32)
        self.length = 0

    def append(self, pages: PageIds) -> None:
        start = self.length
        self.skip(len(pages))
        self._pages[start : self.length] = pages

    def skip(self, count: int) -> None:
        """Append entries that stand for no page."""
        end = self.length + count
        if end > len(self._pages):
            grown = np.zeros(max(end, 2 * len(self._pages)), dtype=np.int32)
            grown[: self.length] = self._pages[: self.length]
            self._pages = grown
        self.length = end

    def clear(self, start: int, end: int) -> None:
        """These pages were freed."""
        self._pages[start:end] = 0

    def span(self, start: int, end: int) -> PageIds:
        """Entries start..end, end <= length. A view, as any slice of this; it is what each step asks for."""
        return self._pages[start:end]

    def __getitem__(self, span: slice) -> PageIds:
        """A view, not a copy."""
        return self._pages[: self.length][span]


class Lease:
    """The ledger of one sequence, from acquire to release. Mutable: it grows and is freed at its lower end.

    full_hit: F, full KV on [0, F) was borrowed at acquire. resume: R, up to where SWA state was live too.
    start: the first position to run; R, or higher when only the windows below F are rebuilt.
    live_from: of [R, F), the positions from here on become the tree's once F is computed.
    branch_point: F when F > R, else None. prompt_len: where the prompt's own window is kept.
    num_computed: as of the last commit. anchors: positions where later prompts are likely to fork, ascending.
    """

    __slots__ = (
        "anchors",
        "branch_point",
        "first_swa",
        "full_hit",
        "full_pages",
        "is_open",
        "live_from",
        "namespace",
        "num_computed",
        "prompt_len",
        "published",
        "resume",
        "start",
        "swa_pages",
        "swa_published",
        "tip",
    )

    def __init__(
        self,
        tip: Node,
        *,
        namespace: str,
        full_hit: int,
        resume: int,
        start: int,
        live_from: int,
        prompt_len: int,
        anchors: tuple[int, ...] = (),
    ) -> None:
        self.tip = tip
        self.namespace = namespace
        self.full_hit = full_hit
        self.resume = resume
        self.start = start
        self.live_from = live_from
        self.branch_point: int | None = full_hit if full_hit > resume else None
        self.prompt_len = prompt_len
        self.anchors = anchors
        self.num_computed = start
        self.published = 0
        self.full_pages = PageRow()
        self.swa_pages = PageRow()
        self.first_swa = 0
        self.swa_published = 0
        self.is_open = True

    def full_table(self, num_pages: int) -> PageIds:
        """[num_pages] ids of the full pages 0..num_pages. A view: valid until the next change."""
        return self.full_pages.span(0, num_pages)

    def swa_table(self, num_pages: int) -> PageIds:
        """Ids of the SWA pages first_swa..num_pages. A view: valid until the next change."""
        return self.swa_pages.span(self.first_swa, num_pages)

    @property
    def owned_full(self) -> PageIds:
        return self.full_pages[self.published : self.full_pages.length]

    @property
    def owned_swa(self) -> PageIds:
        return self.swa_pages[max(self.first_swa, self.swa_published) : self.swa_pages.length]

    @property
    def num_held_swa_pages(self) -> int:
        return self.swa_pages.length - self.first_swa


Tokens = NDArray[np.int32]
