"""Sliding-window state in the tree: per page live or a tombstone, held by kept windows and by leases.

A page of the tree is held while a kept window refers to it or a running sequence has it locked. When the
last of them lets go it is freed, or becomes a scrap where the eviction policy wants that. Positions here
are page indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.audit import AuditError
from forkpoint.cache.components.scraps import ScrapRun, Scraps
from forkpoint.cache.geometry import CacheGeometry
from forkpoint.cache.lease import Lease
from forkpoint.cache.pages import PageIds, PagePool
from forkpoint.cache.paths import owner_of, segments, window_segments
from forkpoint.cache.tree import Counts, Node, SwaSpan, Window, WindowClass
from forkpoint.cache.window_order import Appraisal, WindowOrder
from forkpoint.configs.staircase import Staircase

Indices = NDArray[np.intp]
# Scraps are taken in no smaller portions, where there are so many.
SCRAP_TOKENS_AT_ONCE = 16


class SwaComponent:
    """SWA pages of the tree, and the windows that are kept for later requests."""

    def __init__(
        self, pool: PagePool, geometry: CacheGeometry, order: WindowOrder, staircase: Staircase | None
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.order = order
        self._staircase = staircase
        self._scraps = Scraps()
        self._num_tree_pages = 0
        self._num_locked_pages = 0
        self._num_scrap_pages = 0
        order.bind(self.appraise, lambda: self.pool.num_taken)

    @property
    def num_tree_pages(self) -> int:
        return self._num_tree_pages

    @property
    def num_locked_pages(self) -> int:
        return self._num_locked_pages

    @property
    def num_scrap_pages(self) -> int:
        """Tree pages that nobody holds: as good as free."""
        return self._num_scrap_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._num_tree_pages - self._num_locked_pages

    @property
    def num_available_pages(self) -> int:
        return self.pool.num_free + self._num_tree_pages - self._num_locked_pages

    def reusable(self, path: Sequence[Node], num_pages: int) -> int:
        """The greatest legal page index: SWA live on the last min(p, ceil((W-1)/P)) pages below it."""
        masks = (
            (node.start_page, node.swa.pages[: num_pages - node.start_page] != 0) for node in reversed(path)
        )
        return greatest_legal(masks, num_pages, self.geometry.pages_to_resume)

    # ---- leases

    def adopt(self, node: Node, start: int, own: PageIds) -> None:
        """Give a lease's pages start.. of `node` to the tree, each locked once for that lease.

        `own` is changed in place: where the tree has a live page, the lease's duplicate is freed and the
        tree's id takes its place.
        """
        span = node.swa
        local = slice(start - node.start_page, start - node.start_page + len(own))
        tree_pages, locks = span.pages[local], span.locks[local]
        num_dead = len(own) - _num_nonzero(tree_pages)
        if num_dead < len(own):
            self._note_held(span, local)
        self._num_tree_pages += num_dead
        self._num_locked_pages += len(own) - _num_nonzero(locks)
        locks += 1
        if num_dead == len(own):
            # A new leaf, for example; choosing pages by mask would cost ten times a plain copy.
            tree_pages[:] = own
            return
        is_dead = tree_pages == 0
        self.pool.give(own[~is_dead])
        tree_pages[is_dead] = own[is_dead]
        own[:] = tree_pages

    def num_unlocked(self, tip: Node, start: int, end: int) -> int:
        """How many of pages start..end of the path to `tip` no lease has locked."""
        num_locked = sum(_num_nonzero(node.swa.locks[local]) for node, local in segments(tip, start, end))
        return end - start - num_locked

    def lock(self, tip: Node, start: int, end: int) -> None:
        """Keep pages start..end of the path to `tip` alive for one more lease. They must be live."""
        for node, local in segments(tip, start, end):
            locks = node.swa.locks[local]
            assert _is_full(node.swa.pages[local]), "a lease may only lock live pages"
            self._note_held(node.swa, local)
            self._num_locked_pages += len(locks) - _num_nonzero(locks)
            locks += 1

    def unlock(self, tip: Node, start: int, end: int) -> None:
        """Undo one lock of each page; what nobody holds then is let go."""
        for node, local in segments(tip, start, end):
            locks = node.swa.locks[local]
            assert _is_full(locks), "unlock without lock"
            locks -= 1
            self._num_locked_pages -= len(locks) - _num_nonzero(locks)
            self._let_go(node, local)

    def pages_of(self, tip: Node, start: int, end: int) -> PageIds:
        """Ids of pages start..end of the path to `tip`, in order. A copy."""
        parts = [node.swa.pages[local] for node, local in segments(tip, start, end)]
        return np.concatenate([np.zeros(0, dtype=np.int32), *reversed(parts)])

    # ---- windows

    def keep_window(self, tip: Node, end: int, window_class: WindowClass) -> bool:
        """Keep the live pages below page `end` on the path to `tip`, at most W - 1 + margin positions.

        Returns whether a window is new. None is kept when too few pages are live for `end` to be legal. A
        window that exists is refreshed, and grown where more is live now; its class stays.
        """
        first_wanted = self.geometry.frontier(end * self.geometry.page_size) // self.geometry.page_size
        start = self._live_from(tip, end, first_wanted)
        if end == 0 or end - start < min(end, self.geometry.pages_to_resume):
            return False
        owner = owner_of(tip, end)
        window = owner.swa.windows.get(end)
        is_new = window is None
        if window is None:
            window = owner.swa.windows[end] = Window(owner, end, 0, window_class)
        for node, local in segments(owner, start, end - window.num_pages):
            self._note_held(node.swa, local)
            node.swa.refs[local] += 1
        window.num_pages = max(window.num_pages, end - start)
        self.order.keep(window)
        return is_new

    def window_at(self, tip: Node, end: int) -> Window | None:
        """The kept window that ends at page `end` of the path to `tip`, if any."""
        return owner_of(tip, end).swa.windows.get(end) if end else None

    def windows_over(self, tip: Node, end: int) -> list[Window]:
        """Windows of other branches whose pages make page `end`, the end of the path to `tip`, legal.

        A follow-up that dropped the last tokens of its previous turn resumes inside that turn's window.
        """
        return [
            window
            for child in tip.children.values()
            for window in child.swa.windows.values()
            if window.end_page - window.num_pages <= max(0, end - self.geometry.pages_to_resume)
        ]

    def appraise(self, window: Window) -> Appraisal:
        """What losing a window would free, and what it would cost to rebuild it from the next legal length.

        Locks do not count in either: who has borrowed the window will be gone when the next one wants it.
        """
        # Which pages other windows keep: among its own, and then below it down to page 0.
        shared = [
            (node.start_page + local.start, node.swa.refs[local] > 1)
            for node, local in window_segments(window)
        ]
        num_freed = window.num_pages - sum(_num_nonzero(is_kept) for _, is_kept in shared)
        below = (
            (node.start_page, node.swa.refs[local] > 0)
            for node, local in segments(window.node, 0, window.end_page - window.num_pages)
        )
        resume = greatest_legal(chain(shared, below), window.end_page, self.geometry.pages_to_resume)
        size = self.geometry.page_size
        return Appraisal(num_freed, _rebuild_cost(self._staircase, window.end_page * size, resume * size))

    def evict(self, num_pages: int) -> tuple[int, int]:
        """Make num_pages free: scraps first, then whole windows, least valued first.

        Returns how many windows went, and how many pages only they held. A window whose pages are all
        locked frees nothing and is passed over.
        """
        windows = pages = 0
        self._reclaim(num_pages)
        if self.pool.num_free >= num_pages:
            return windows, pages
        victims = self.order.victims()
        while self.pool.num_free < num_pages and (window := next(victims, None)) is not None:
            if self._num_locked_pages and self._is_locked(window):
                continue
            pages += self.drop_window(window, is_evicted=True)
            windows += 1
            self._reclaim(num_pages)
        victims.close()  # puts back what it passed over
        return windows, pages

    def _is_locked(self, window: Window) -> bool:
        return all(_is_full(node.swa.locks[local]) for node, local in window_segments(window))

    def drop_window(self, window: Window, *, is_evicted: bool = False) -> int:
        """Forget a window; returns how many pages nobody holds for that."""
        let_go = 0
        for node, local in window_segments(window):
            node.swa.refs[local] -= 1
            let_go += self._let_go(node, local)
        del window.node.swa.windows[window.end_page]
        self.order.forget(window, is_evicted=is_evicted)
        return let_go

    def drop(self, node: Node) -> None:
        """The leaf leaves the tree: its windows go, and with them all its pages."""
        for window in list(node.swa.windows.values()):
            self.drop_window(window, is_evicted=True)
        self._free_scraps(node, _scraps_in(node.swa, slice(0, node.num_pages)))
        assert not node.swa.pages.any(), "an unlocked leaf holds SWA pages that no window of its own keeps"

    def _live_from(self, tip: Node, end: int, lowest: int) -> int:
        """The lowest page such that all of it..end is live, not below `lowest`."""
        start = end
        for node, local in segments(tip, lowest, end):
            dead = (node.swa.pages[local] == 0).nonzero()[0]
            if len(dead):
                return int(node.start_page + local.start + dead[-1] + 1)
            start = node.start_page + int(local.start)
        return start

    # ---- pages that nobody holds

    def _note_held(self, span: SwaSpan, local: slice) -> None:
        """These pages are about to be held: the scraps among them are none any more."""
        if not self._num_scrap_pages:
            return
        is_unheld = (span.refs[local] | span.locks[local]) == 0
        if _num_nonzero(is_unheld):
            self._num_scrap_pages -= _num_nonzero(span.pages[local][is_unheld])

    def _let_go(self, node: Node, local: slice) -> int:
        """Somebody gave these live pages up: free, or keep as scraps, what nobody holds. Returns how many."""
        holders, locks = node.swa.refs[local], node.swa.locks[local]
        if _num_nonzero(locks):
            holders = holders | locks
        count = len(holders) - _num_nonzero(holders)
        if not count:
            return 0
        if self.order.keeps_scraps:
            self._num_scrap_pages += count
            self._scraps.add(node, node.start_page + local.start, node.start_page + local.stop)
            self._scraps.compact(self._has_scraps)
        else:
            self._free(node, (holders == 0).nonzero()[0] + local.start)
        return count

    def _reclaim(self, num_pages: int) -> None:
        """Free scraps, oldest first, until num_pages are free or there are none."""
        while (wanted := num_pages - self.pool.num_free) > 0 and self._num_scrap_pages:
            run = self._scraps.oldest
            # A decode step wants one page: take a few at once, but do not look through a whole prompt.
            wanted = max(wanted, SCRAP_TOKENS_AT_ONCE // self.geometry.page_size)
            end = min(run.end, run.start + max(64, wanted))
            for node, local in reversed(list(segments(run.node, run.start, end))):
                scraps = _scraps_in(node.swa, local)[:wanted]
                self._free_scraps(node, scraps)
                wanted -= len(scraps)
                if not wanted:
                    end = node.start_page + int(scraps[-1]) + 1
                    break
            self._scraps.use_up(end)

    def _free_scraps(self, node: Node, scraps: Indices) -> None:
        self._num_scrap_pages -= len(scraps)
        self._free(node, scraps)

    def _free(self, node: Node, chosen: Indices) -> None:
        pages = node.swa.pages
        self.pool.give(pages[chosen])
        pages[chosen] = 0
        self._num_tree_pages -= len(chosen)

    def _has_scraps(self, run: ScrapRun) -> bool:
        return any(len(_scraps_in(node.swa, local)) for node, local in segments(run.node, run.start, run.end))

    # ---- checking

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
        if not np.array_equal(refs, _count(total, start_of, map(window_segments, windows))):
            raise AuditError("swa: references of pages are not those of the kept windows")
        borrowed = [segments(lease.tip, lease.first_swa, lease.swa_published) for lease in leases]
        if not np.array_equal(locks, _count(total, start_of, iter(borrowed))):
            raise AuditError("swa: locks of pages are not the sum over the leases")
        self._audit_tables(leases)

        is_held = (refs > 0) | (locks > 0)
        is_scrap = (pages != 0) & ~is_held
        if (is_held & (pages == 0)).any():
            raise AuditError("swa: a page is dead that somebody holds")
        runs = [
            ((node, local) for node, local in segments(run.node, run.start, run.end) if node in start_of)
            for run in self._scraps.runs()
        ]
        if (is_scrap & (_count(total, start_of, iter(runs)) == 0)).any():
            raise AuditError("swa: a page is live that nobody holds and nobody will reclaim")
        ledger = (self._num_tree_pages, self._num_locked_pages, self._num_scrap_pages)
        recount = tuple(int(np.count_nonzero(each)) for each in (pages, locks, is_scrap))
        if ledger != recount:
            raise AuditError(f"swa: ledger (tree, locked, scraps) {ledger}, recount {recount}")
        live: PageIds = pages[pages != 0]
        return live

    def _audit_tables(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            end = max(lease.first_swa, lease.swa_published)
            borrowed = self.pages_of(lease.tip, lease.first_swa, lease.swa_published)
            if not np.array_equal(borrowed, lease.swa_pages[lease.first_swa : end]):
                raise AuditError("swa: a lease's borrowed pages are not those of its path")

    def _audit_windows(self, nodes: Sequence[Node], windows: Sequence[Window]) -> None:
        for node in nodes:
            for end, window in node.swa.windows.items():
                is_inside = node.start_page < end <= node.end_page
                if window.node is not node or not is_inside or end != window.end_page:
                    raise AuditError(f"swa: window that ends at page {end} is filed at a wrong node")
        if set(map(id, windows)) != set(map(id, self.order.windows())):
            raise AuditError("swa: the eviction order does not hold exactly the kept windows")


def greatest_legal(masks: Iterable[tuple[int, NDArray[np.bool_]]], end: int, needed: int) -> int:
    """The greatest page index p <= end with `needed` live pages right below it (all of them when p is less).

    masks: (start page, which pages are live) of consecutive stretches, the highest first, down to page 0.
    """
    if needed == 0:
        return end
    # end: candidate. Everything from the page looked at last up to `end` is live.
    for start, is_live in masks:
        # Not flatnonzero and diff: on a short array their wrappers cost more than the work.
        dead = (~is_live).nonzero()[0]
        if len(dead):
            if end - (start + int(dead[-1]) + 1) >= needed:
                return end
            long_runs = (dead[1:] - dead[:-1] > needed).nonzero()[0]
            if len(long_runs):
                return start + int(dead[long_runs[-1] + 1])
            end = start + int(dead[0])
        if end - start >= needed:
            return end
    return end


@lru_cache(maxsize=4096)
def _rebuild_cost(stairs: Staircase | None, full_hit: int, resume: int) -> int:
    """Row-layers to make [resume, full_hit) usable again."""
    if stairs is None:
        return full_hit - resume
    return stairs.row_layers(full_hit, resume, stairs.start(full_hit, resume), full_hit)


def _scraps_in(span: SwaSpan, local: slice) -> Indices:
    """Indices, within the node, of live pages that nobody holds."""
    is_scrap = (span.refs[local] | span.locks[local]) == 0
    is_scrap &= span.pages[local] != 0
    return np.asarray(is_scrap.nonzero()[0] + local.start)


def _num_nonzero(counts: NDArray[np.generic]) -> int:
    return int(np.count_nonzero(counts))


def _is_full(counts: Counts) -> bool:
    """Whether no entry is 0. Several times as fast as all() on a short array."""
    return _num_nonzero(counts) == len(counts)


def _count(
    total: int, start_of: dict[Node, int], stretches: Iterator[Iterator[tuple[Node, slice]]]
) -> Counts:
    """How many of the stretches cover each page, over all nodes laid end to end."""
    counts = np.zeros(total, dtype=np.int32)
    for stretch in stretches:
        for node, local in stretch:
            counts[start_of[node] + local.start : start_of[node] + local.stop] += 1
    return counts
