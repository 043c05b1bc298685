"""Sliding-window state in the tree: per page live or a tombstone, held by kept windows and by leases.

A page of the tree is live exactly while a kept window refers to it or a running sequence has it locked.
Whoever lets go last frees it. Positions here are page indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forkpoint.cache.audit import AuditError
from forkpoint.cache.eviction import WindowOrder
from forkpoint.cache.geometry import CacheGeometry
from forkpoint.cache.lease import Lease
from forkpoint.cache.pages import PageIds, PagePool
from forkpoint.cache.tree import Node, Window


class SwaComponent:
    """SWA pages of the tree, and the windows that are kept for later requests."""

    def __init__(self, pool: PagePool, geometry: CacheGeometry, order: WindowOrder) -> None:
        self.pool = pool
        self.geometry = geometry
        self.order = order
        self._num_tree_pages = 0
        self._num_locked_pages = 0

    @property
    def num_tree_pages(self) -> int:
        return self._num_tree_pages

    @property
    def num_locked_pages(self) -> int:
        return self._num_locked_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._num_tree_pages - self._num_locked_pages

    def reusable(self, path: Sequence[Node], num_pages: int) -> int:
        """The greatest legal page index: SWA live on the last min(p, ceil((W-1)/P)) pages below it."""
        needed = self.geometry.pages_to_resume
        if needed == 0:
            return num_pages
        # end: candidate. Everything from the page looked at last up to `end` is live.
        end = num_pages
        for node in reversed(path):
            dead = np.flatnonzero(node.swa.pages[: num_pages - node.start_page] == 0)
            if len(dead):
                if end - (node.start_page + int(dead[-1]) + 1) >= needed:
                    return end
                long_runs = np.flatnonzero(np.diff(dead) > needed)
                if len(long_runs):
                    return node.start_page + int(dead[long_runs[-1] + 1])
                end = node.start_page + int(dead[0])
            if end - node.start_page >= needed:
                return end
        return end

    def adopt(self, node: Node, start: int, own: PageIds) -> None:
        """Give a lease's pages start.. of `node` to the tree, each locked once for that lease.

        `own` is changed in place: where the tree has a live page, the lease's duplicate is freed and the
        tree's id takes its place.
        """
        span = node.swa
        local = slice(start - node.start_page, start - node.start_page + len(own))
        tree_pages, locks = span.pages[local], span.locks[local]
        is_dead = tree_pages == 0
        self.pool.give(own[~is_dead])
        self._num_tree_pages += int(is_dead.sum())
        self._num_locked_pages += int((locks == 0).sum())
        tree_pages[is_dead] = own[is_dead]
        locks += 1
        own[:] = tree_pages

    def num_unlocked(self, tip: Node, start: int, end: int) -> int:
        """How many of pages start..end of the path to `tip` no lease has locked."""
        return sum(int((node.swa.locks[local] == 0).sum()) for node, local in _segments(tip, start, end))

    def lock(self, tip: Node, start: int, end: int) -> None:
        """Keep pages start..end of the path to `tip` alive for one more lease. They must be live."""
        for node, local in _segments(tip, start, end):
            locks = node.swa.locks[local]
            assert (node.swa.pages[local] != 0).all(), "a lease may only lock live pages"
            self._num_locked_pages += int((locks == 0).sum())
            locks += 1

    def unlock(self, tip: Node, start: int, end: int) -> int:
        """Undo one lock of each page; returns how many pages that freed."""
        freed = 0
        for node, local in _segments(tip, start, end):
            locks = node.swa.locks[local]
            assert (locks > 0).all(), "unlock without lock"
            locks -= 1
            self._num_locked_pages -= int((locks == 0).sum())
            freed += self._free_unheld(node, local)
        return freed

    def pages_of(self, tip: Node, start: int, end: int) -> PageIds:
        """Ids of pages start..end of the path to `tip`, in order. A copy."""
        parts = [node.swa.pages[local] for node, local in _segments(tip, start, end)]
        return np.concatenate([np.zeros(0, dtype=np.int32), *reversed(parts)])

    def keep_window(self, tip: Node, end: int, *, is_branch: bool) -> Window | None:
        """Keep the live pages below page `end` on the path to `tip`, at most W - 1 + margin positions.

        Returns None when too few are live for `end` to be legal. A window that exists is refreshed, and
        grown where more is live now.
        """
        first_wanted = self.geometry.frontier(end * self.geometry.page_size) // self.geometry.page_size
        start = self._live_from(tip, end, first_wanted)
        if end == 0 or end - start < min(end, self.geometry.pages_to_resume):
            return None
        owner = _owner_of(tip, end)
        window = owner.swa.windows.get(end)
        if window is None:
            window = owner.swa.windows[end] = Window(owner, end, 0, is_branch)
        window.is_branch |= is_branch
        for node, local in _segments(owner, start, end - window.num_pages):
            node.swa.refs[local] += 1
        window.num_pages = max(window.num_pages, end - start)
        self.order.touch(window)
        return window

    def window_at(self, tip: Node, end: int) -> Window | None:
        """The kept window that ends at page `end` of the path to `tip`, if any."""
        return _owner_of(tip, end).swa.windows.get(end) if end else None

    def evict(self, num_pages: int) -> tuple[int, int]:
        """Drop whole windows, least valued first, until num_pages are free. Returns (windows, pages) gone.

        A window whose pages are all locked frees nothing and is passed over.
        """
        windows = pages = 0
        for window in self.order.victims():
            if self.pool.num_free >= num_pages:
                break
            if all((node.swa.locks[local] > 0).all() for node, local in _window_segments(window)):
                continue
            pages += self.drop_window(window)
            windows += 1
        return windows, pages

    def drop_window(self, window: Window) -> int:
        """Forget a window; returns how many pages that freed."""
        freed = 0
        for node, local in _window_segments(window):
            node.swa.refs[local] -= 1
            freed += self._free_unheld(node, local)
        del window.node.swa.windows[window.end_page]
        self.order.forget(window)
        return freed

    def drop(self, node: Node) -> None:
        """The leaf leaves the tree: its windows go, and with them all its pages."""
        for window in list(node.swa.windows.values()):
            self.drop_window(window)
        assert not node.swa.pages.any(), "an unlocked leaf holds SWA pages that no window of its own keeps"

    def _live_from(self, tip: Node, end: int, lowest: int) -> int:
        """The lowest page such that all of it..end is live, not below `lowest`."""
        start = end
        for node, local in _segments(tip, lowest, end):
            pages = node.swa.pages[local]
            dead = np.flatnonzero(pages == 0)
            if len(dead):
                return int(node.start_page + local.start + dead[-1] + 1)
            start = node.start_page + int(local.start)
        return start

    def _free_unheld(self, node: Node, local: slice) -> int:
        span = node.swa
        pages = span.pages[local]
        is_free = (span.refs[local] == 0) & (span.locks[local] == 0) & (pages != 0)
        count = int(is_free.sum())
        if count:
            self.pool.give(pages[is_free])
            pages[is_free] = 0
            self._num_tree_pages -= count
        return count

    def audit(self, nodes: Sequence[Node], leases: Sequence[Lease]) -> PageIds:
        """Recount references, locks and ledger; returns the ids of all pages that the tree holds.

        Raises AuditError on the first disagreement.
        """
        start_of: dict[Node, int] = {}
        total = 0
        for node in nodes:
            start_of[node] = total
            total += node.num_pages
        empty = np.zeros(0, dtype=np.int32)
        pages = np.concatenate([empty, *(node.swa.pages for node in nodes)])
        refs = np.concatenate([empty, *(node.swa.refs for node in nodes)])
        locks = np.concatenate([empty, *(node.swa.locks for node in nodes)])

        windows = [window for node in nodes for window in node.swa.windows.values()]
        self._audit_windows(nodes, windows)
        wanted_refs = np.zeros(total, dtype=np.int32)
        for window in windows:
            for node, local in _window_segments(window):
                wanted_refs[start_of[node] + local.start : start_of[node] + local.stop] += 1
        if not np.array_equal(refs, wanted_refs):
            raise AuditError("swa: references of pages are not those of the kept windows")

        wanted_locks = np.zeros(total, dtype=np.int32)
        for lease in leases:
            for node, local in _segments(lease.tip, lease.first_swa, lease.swa_published):
                wanted_locks[start_of[node] + local.start : start_of[node] + local.stop] += 1
            borrowed = self.pages_of(lease.tip, lease.first_swa, lease.swa_published)
            if not np.array_equal(
                borrowed, lease.swa_pages[lease.first_swa : max(lease.first_swa, lease.swa_published)]
            ):
                raise AuditError("swa: a lease's borrowed pages are not those of its path")
        if not np.array_equal(locks, wanted_locks):
            raise AuditError("swa: locks of pages are not the sum over the leases")

        if not np.array_equal(pages != 0, (refs > 0) | (locks > 0)):
            raise AuditError("swa: a page is live that nobody holds, or dead that somebody holds")
        ledger, recount = (
            (self._num_tree_pages, self._num_locked_pages),
            (int((pages != 0).sum()), int((locks > 0).sum())),
        )
        if ledger != recount:
            raise AuditError(f"swa: ledger (tree, locked) {ledger}, recount {recount}")
        live: PageIds = pages[pages != 0]
        return live

    def _audit_windows(self, nodes: Sequence[Node], windows: Sequence[Window]) -> None:
        for node in nodes:
            for end, window in node.swa.windows.items():
                if (
                    window.node is not node
                    or not node.start_page < end <= node.end_page
                    or end != window.end_page
                ):
                    raise AuditError(f"swa: window that ends at page {end} is filed at a wrong node")
        if set(map(id, windows)) != set(map(id, self.order.victims())):
            raise AuditError("swa: the eviction order does not hold exactly the kept windows")


def _segments(tip: Node, start: int, end: int) -> Iterator[tuple[Node, slice]]:
    """The parts of nodes on the path to `tip` that cover pages start..end, from the end upwards."""
    if start >= end:
        return
    for node in tip.up_to_root():
        if node.start_page < end:
            low, high = max(start, node.start_page), min(end, node.end_page)
            yield node, slice(low - node.start_page, high - node.start_page)
        if node.start_page <= start:
            return


def _window_segments(window: Window) -> Iterator[tuple[Node, slice]]:
    return _segments(window.node, window.end_page - window.num_pages, window.end_page)


def _owner_of(tip: Node, end: int) -> Node:
    """The node on the path to `tip` in which page number `end` - 1 lies."""
    for node in tip.up_to_root():
        if node.start_page < end:
            return node
    raise AssertionError(f"page {end} is not below the tip")
