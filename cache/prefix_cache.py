"""The unified prefix cache: match looks, acquire takes, commit publishes, release returns.

One tree holds both kinds of state. A sequence's pages move from its lease to the tree when they are
published; what the tree has already is freed and borrowed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.audit import AuditError, audit_pages, audit_structure
from forkpoint.cache.components.full import FullComponent
from forkpoint.cache.components.swa import SwaComponent
from forkpoint.cache.description import TreeDescription, describe_tree
from forkpoint.cache.eviction import EVICTION_POLICIES
from forkpoint.cache.geometry import CacheGeometry
from forkpoint.cache.lease import Lease
from forkpoint.cache.pages import OutOfPages, PagePool, num_pages_for
from forkpoint.cache.retention import RETENTION_POLICIES, Keep
from forkpoint.cache.tree import Node, RadixTree, SwaSpan
from forkpoint.configs.staircase import Staircase

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a prompt. Lengths are positions, multiples of the page size.

    full_len: F, the longest prefix with live full KV. resume_len: R <= F, the greatest legal length.
    path: the nodes below the root that cover [0, F); valid until the cache changes.
    """

    namespace: str
    full_len: int
    resume_len: int
    path: tuple[Node, ...]
    version: int

    @property
    def branch_point(self) -> int | None:
        """F when F > R: where a kept window would have made the whole hit usable."""
        return self.full_len if self.full_len > self.resume_len else None


@dataclass(frozen=True, slots=True)
class Commit:
    """What a publish did. published: tokens of this sequence that the tree now holds."""

    published: int
    windows_kept: int
    branch_point_kept: bool


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages of one kind: free + tree + leased = capacity; locked is the part of tree that leases need."""

    capacity: int
    free: int
    tree: int
    locked: int

    @property
    def leased(self) -> int:
        return self.capacity - self.free - self.tree

    @property
    def available(self) -> int:
        """What an allocation can get: free pages, and tree pages that can be evicted."""
        return self.free + self.tree - self.locked


@dataclass(slots=True)
class CacheCounters:
    """Totals since the cache was made; mutable, they only grow. Slots are tokens."""

    evicted_full_slots: int = 0
    evicted_swa_slots: int = 0
    windows_kept: int = 0
    windows_evicted: int = 0
    windows_rebuilt: int = 0
    branch_points_found: int = 0
    branch_points_kept: int = 0
    branch_points_hit: int = 0


class PrefixCache:
    """Pages of both kinds, shared between requests by prefix.

    full_pages, swa_pages: capacities in pages, page 0 not counted. Without a window there is no SWA kind.
    With enabled=False nothing is published and nothing matches; leases and pools work the same.
    staircase: how a lost window below a full hit is rebuilt; None: the gap [R, F) is run in all layers.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        full_pages: int,
        swa_pages: int = 0,
        retention: str = "branch",
        eviction: str = "lru",
        enabled: bool = True,
        staircase: Staircase | None = None,
    ) -> None:
        self.geometry = geometry
        self.enabled = enabled
        self.staircase = staircase
        self.counters = CacheCounters()
        self._retention = RETENTION_POLICIES[retention]
        self._tree = RadixTree(geometry.page_size)
        self._full = FullComponent(PagePool("full", full_pages))
        self._swa: SwaComponent | None = None
        if geometry.window is not None:
            order = EVICTION_POLICIES[eviction](swa_pages)
            self._swa = SwaComponent(PagePool("swa", swa_pages), geometry, order, staircase)
        self._leases: dict[int, Lease] = {}
        self._version = 0

    # ---- looking

    @property
    def full_use(self) -> PoolUse:
        full = self._full
        return PoolUse(full.pool.capacity, full.pool.num_free, full.num_tree_pages, full.num_locked_pages)

    @property
    def swa_use(self) -> PoolUse | None:
        swa = self._swa
        if swa is None:
            return None
        return PoolUse(swa.pool.capacity, swa.pool.num_free, swa.num_tree_pages, swa.num_locked_pages)

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, over all namespaces."""
        return len(self._tree.recency)

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """How much of `tokens` is cached; at most len(tokens) - 1, so that one row is computed.

        Changes nothing: no ledger, no node, no recency.
        """
        limit = (len(tokens) - 1) // self.geometry.page_size
        path, full = self._tree.walk(tokens, limit, namespace) if self.enabled else ([], 0)
        resume = full if self._swa is None else self._swa.reusable(path, full)
        size = self.geometry.page_size
        return Match(namespace, full * size, resume * size, tuple(path), self._version)

    def pages_to_lock(self, match: Match) -> tuple[int, int]:
        """Full and SWA pages that acquire(match) would take out of what can be evicted."""
        full_end = match.full_len // self.geometry.page_size
        full = sum(min(node.num_pages, full_end - node.start_page) for node in match.path if node.pins == 0)
        if self._swa is None or not match.path:
            return full, 0
        if self._first_rows_of(match)[0] > match.resume_len:
            return full, 0
        resume = match.resume_len // self.geometry.page_size
        return full, self._swa.num_unlocked(match.path[-1], self._first_borrowed(resume), resume)

    def _first_borrowed(self, resume: int) -> int:
        return max(0, resume - self.geometry.pages_to_resume)

    # ---- taking

    def acquire(self, match: Match, *, prompt_len: int, anchors: tuple[int, ...] = ()) -> Lease:
        """Borrow what `match` found: full KV on [0, F), and the SWA window below R.

        The match must be the newest state of the cache. May split a node; marks the path as used.
        """
        assert match.version == self._version, "the cache changed since this match"
        self._version += 1
        size = self.geometry.page_size
        full, resume = match.full_len // size, match.resume_len // size
        tip = self._tip_of(match, full)
        start, live_from = self._first_rows_of(match)
        lease = Lease(
            tip,
            namespace=match.namespace,
            full_hit=match.full_len,
            resume=match.resume_len,
            start=start,
            live_from=live_from,
            prompt_len=prompt_len,
            anchors=anchors,
        )
        self._full.pin(tip)
        self._tree.touch(tip)
        lease.published = full
        parts = []
        for node in tip.up_to_root():
            node.hits += 1
            parts.append(node.full_pages)
        if parts:
            lease.full_pages.append(np.concatenate(parts[::-1]))
        self._borrow_window(lease, resume)
        self.counters.windows_rebuilt += lease.branch_point is not None and self.staircase is not None
        self.counters.branch_points_found += lease.branch_point is not None
        self._leases[id(lease)] = lease
        return lease

    def _tip_of(self, match: Match, full: int) -> Node:
        if not match.path:
            return self._tree.root(match.namespace)
        last = match.path[-1]
        return last if last.end_page == full else self._tree.split(last, full - last.start_page)

    def _first_rows_of(self, match: Match) -> tuple[int, int]:
        """(start, live_from) of a lease on this match."""
        full, resume = match.full_len, match.resume_len
        if self.staircase is None or full == resume:
            return resume, resume
        return self.staircase.start(full, resume), self.staircase.live_from(full, resume)

    def _borrow_window(self, lease: Lease, resume: int) -> None:
        swa = self._swa
        if swa is None:
            return
        if lease.start > lease.resume:
            # A rebuild that starts above R never looks below its own first rows.
            first = lease.start // self.geometry.page_size
            lease.swa_pages.skip(first)
            lease.first_swa = lease.swa_published = first
            return
        first = self._first_borrowed(resume)
        lease.swa_pages.skip(first)
        lease.first_swa, lease.swa_published = first, resume
        if resume == 0:
            return
        lease.swa_pages.append(swa.pages_of(lease.tip, first, resume))
        swa.lock(lease.tip, first, resume)
        window = swa.window_at(lease.tip, resume)
        if window is not None:
            self.counters.branch_points_hit += window.window_class == "branch"
            swa.order.hit(window)
            return
        for covering in swa.windows_over(lease.tip, resume):
            swa.order.hit(covering)
        if self._retention.keeps_branch_points:
            # Resumed inside another window's margin, at scraps or at a running neighbour: worth a window.
            self._keep(lease, Keep(resume * self.geometry.page_size, "branch"))

    def extend(self, lease: Lease, end: int) -> None:
        """Make sure that the lease has pages of each kind for all positions below `end`.

        Evicts what nobody needs, per kind. Raises OutOfPages, with nothing taken, when that is not enough.
        """
        full, swa = self._full, self._swa
        pages = num_pages_for(end, self.geometry.page_size)
        if pages <= lease.full_pages.length and (swa is None or pages <= lease.swa_pages.length):
            return  # nearly every decode row: it lies in a page that its sequence has
        full_wanted = pages - lease.full_pages.length
        swa_wanted = 0 if swa is None else pages - lease.swa_pages.length
        if full_wanted > full.num_available_pages:
            raise OutOfPages("full", full_wanted, full.num_available_pages)
        if swa is not None and swa_wanted > swa.num_available_pages:
            raise OutOfPages("swa", swa_wanted, swa.num_available_pages)
        if full_wanted > 0:
            self._make_room_full(full_wanted)
            lease.full_pages.append(full.pool.take(full_wanted))
        if swa is not None and swa_wanted > 0:
            self._make_room_swa(swa, swa_wanted)
            lease.swa_pages.append(swa.pool.take(swa_wanted))

    def max_end(self, lease: Lease) -> int:
        """The greatest `end` that extend(lease, end) can serve now."""
        pages = lease.full_pages.length + self._full.num_available_pages
        if self._swa is not None:
            pages = min(pages, lease.swa_pages.length + self._swa.num_available_pages)
        return pages * self.geometry.page_size

    def max_end_without_eviction(self, lease: Lease) -> int:
        """The greatest `end` that extend(lease, end) can serve now without giving up a kept window.

        Under a policy that values windows; where none does, the same as max_end.
        """
        swa = self._swa
        if swa is None or not swa.order.keeps_scraps:
            return self.max_end(lease)
        pages = lease.swa_pages.length + swa.pool.num_free + swa.num_scrap_pages
        return min(self.max_end(lease), pages * self.geometry.page_size)

    def _make_room_full(self, wanted: int) -> None:
        if self._full.pool.num_free >= wanted:
            return
        for node in self._tree.unpinned_leaves():
            self._evict_leaf(node)
            if self._full.pool.num_free >= wanted:
                return
        raise AssertionError("full pages counted as evictable were not")

    def _evict_leaf(self, leaf: Node) -> None:
        self._version += 1
        size = self.geometry.page_size
        self.counters.evicted_full_slots += leaf.num_pages * size
        if self._swa is not None:
            self.counters.windows_evicted += len(leaf.swa.windows)
            self.counters.evicted_swa_slots += int((leaf.swa.pages != 0).sum()) * size
            self._swa.drop(leaf)
        self._full.drop(leaf)
        self._tree.remove_leaf(leaf)

    def evict_windows(self) -> None:
        """Give up all SWA state that no running sequence needs; full KV stays. For measurements."""
        if self._swa is not None:
            self._evict_swa(self._swa, self._swa.pool.capacity)

    def _make_room_swa(self, swa: SwaComponent, wanted: int) -> None:
        if swa.pool.num_free >= wanted:
            return
        self._evict_swa(swa, wanted)
        assert swa.pool.num_free >= wanted, "SWA pages counted as evictable were not"

    def _evict_swa(self, swa: SwaComponent, wanted: int) -> None:
        self._version += 1
        windows, pages = swa.evict(wanted)
        self.counters.windows_evicted += windows
        self.counters.evicted_swa_slots += pages * self.geometry.page_size

    # ---- publishing

    def commit(self, lease: Lease, tokens: Tokens, num_computed: int) -> Commit:
        """Publish what is computed: insert, adopt, keep windows, then free what left the running window.

        tokens: the sequence's tokens, at least num_computed. Nothing of a gap [R, F) is published before
        the gap is complete: until then its SWA pages are private.
        """
        assert lease.is_open
        self._version += 1
        size = self.geometry.page_size
        target = num_computed // size
        previously, lease.num_computed = lease.num_computed, num_computed
        kept, branch_kept = 0, False
        if self.enabled and num_computed >= lease.full_hit:
            self._publish(lease, tokens, target)
            for keep in self._wanted_windows(lease, previously, num_computed):
                is_kept = self._keep(lease, keep)
                kept += is_kept
                branch_kept |= is_kept and keep.end == lease.branch_point
        self.counters.branch_points_kept += branch_kept
        self._free_below_frontier(lease, num_computed)
        return Commit(lease.published * size, kept, branch_kept)

    def _wanted_windows(self, lease: Lease, previously: int, num_computed: int) -> list[Keep]:
        if self._swa is None:
            return []
        return self._retention.keeps(lease, previously, num_computed, self.geometry)

    def _keep(self, lease: Lease, keep: Keep) -> bool:
        """Whether a new window was kept; one that exists at this place is refreshed."""
        end_page = keep.end // self.geometry.page_size
        if self._swa is None or end_page == 0:
            return False
        is_new = self._swa.keep_window(lease.tip, end_page, keep.window_class)
        self.counters.windows_kept += is_new
        return is_new

    def _publish(self, lease: Lease, tokens: Tokens, target: int) -> None:
        """Insert pages up to `target` below the lease's tip, and give the tree the SWA pages it lacks."""
        old_tip = lease.tip
        if lease.live_from > lease.resume:
            # Below live_from a rebuilt position is right in the lower layers only: never the tree's.
            self._free_swa_below(lease, lease.live_from // self.geometry.page_size)
        self._adopt_swa(lease, old_tip, old_tip.end_page)
        page, node = lease.published, old_tip
        while page < target:
            node = self._child_for(node, lease, tokens, page, target)
            page = node.end_page
            self._adopt_swa(lease, node, page)
        if node is not old_tip:
            self._full.pin(node)
            self._full.unpin(old_tip)
            lease.tip = node
            lease.published = page
        self._tree.touch(node)

    def _child_for(self, node: Node, lease: Lease, tokens: Tokens, page: int, target: int) -> Node:
        """The child of `node` on the lease's path, made or cut so that it ends at `target` or earlier."""
        size = self.geometry.page_size
        child = node.children.get(self._tree.key(tokens, page))
        own = lease.full_pages[page:target]
        if child is None:
            span = SwaSpan.dead(target - page)
            child = self._tree.add_leaf(node, tokens[page * size : target * size], own, span)
            self._full.adopt(child)
            return child
        shared = self._tree.common_pages(child, tokens, page, target)
        if shared < child.num_pages:
            child = self._tree.split(child, shared)
        self._full.keep_tree_copy(own[:shared], child.full_pages)
        return child

    def _adopt_swa(self, lease: Lease, node: Node, end: int) -> None:
        """Give the tree the lease's private SWA pages below page `end`, all on the path to `node`."""
        if self._swa is None:
            return
        start = max(lease.swa_published, lease.first_swa)
        for part in reversed(list(node.up_to_root())) if start < node.start_page else [node]:
            low, high = max(start, part.start_page), min(end, part.end_page)
            if low < high:
                self._swa.adopt(part, low, lease.swa_pages[low:high])
        lease.swa_published = max(lease.swa_published, end)

    def _free_below_frontier(self, lease: Lease, num_computed: int) -> None:
        swa = self._swa
        if swa is None:
            return
        frontier = self.geometry.frontier(num_computed) // self.geometry.page_size
        self._free_swa_below(lease, min(frontier, lease.swa_pages.length))

    def _free_swa_below(self, lease: Lease, page: int) -> None:
        swa = self._swa
        assert swa is not None
        if page <= lease.first_swa:
            return
        self._version += 1
        first = lease.first_swa
        borrowed_end = max(first, min(page, lease.swa_published))
        if first < borrowed_end:
            swa.unlock(lease.tip, first, borrowed_end)
        if borrowed_end < page:
            swa.pool.give(lease.swa_pages[borrowed_end:page])
        lease.swa_pages.clear(first, page)
        lease.first_swa = page

    def advance(self, lease: Lease, num_computed: int) -> None:
        """Free what left the window, without publishing: what decode does after each token."""
        # After most tokens no page leaves the window.
        if self._swa is not None:
            frontier = self.geometry.frontier(num_computed) // self.geometry.page_size
            if frontier > lease.first_swa:
                self._free_below_frontier(lease, num_computed)

    # ---- returning

    def release(self, lease: Lease, tokens: Tokens, num_computed: int, *, keeps_end: bool = True) -> None:
        """Publish what is computed, keep a window at its end, and return everything else.

        Finish, abort and retraction alike; a gap that is not complete leaves nothing behind. keeps_end:
        whether the window at num_computed is worth keeping.
        """
        self.commit(lease, tokens, num_computed)
        if keeps_end and self.enabled and num_computed >= lease.full_hit:
            self._keep(lease, Keep(num_computed, "finish_tail"))
        if self._swa is not None:
            self._free_swa_below(lease, lease.swa_pages.length)
        self._full.pool.give(lease.owned_full)
        self._full.unpin(lease.tip)
        self._tree.prune_root(lease.namespace)
        lease.is_open = False
        del self._leases[id(lease)]
        self._version += 1

    def flush(self) -> bool:
        """Forget everything that is cached. Refused (False) while a lease is open."""
        if self._leases:
            return False
        for node in self._tree.unpinned_leaves():
            if self._swa is not None:
                self._swa.drop(node)
            self._full.drop(node)
            self._tree.remove_leaf(node)
        self._tree.roots.clear()
        self._version += 1
        return True

    # ---- checking

    def audit(self) -> None:
        """Recount everything. Raises AuditError on the first contradiction. O(size of the cache)."""
        leases = list(self._leases.values())
        nodes = audit_structure(self._tree, [lease.tip for lease in leases])
        self._full.audit(nodes)
        audit_pages(
            self._full.pool,
            [node.full_pages for node in nodes] + [lease.owned_full for lease in leases],
        )
        self._audit_borrowed_full(leases)
        if self._swa is None:
            return
        audit_pages(
            self._swa.pool,
            [self._swa.audit(nodes, leases)] + [lease.owned_swa for lease in leases],
        )

    def _audit_borrowed_full(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            path = [node.full_pages for node in reversed(list(lease.tip.up_to_root()))]
            borrowed = np.concatenate(path) if path else np.zeros(0, dtype=np.int32)
            if not np.array_equal(borrowed, lease.full_pages[0 : lease.published]):
                raise AuditError("full: a lease's borrowed pages are not those of its path")

    def describe(self, *, max_nodes: int) -> TreeDescription:
        """The tree as counts, for people who look at it. O(max_nodes), however large the tree is."""
        return describe_tree(
            self._tree,
            max_nodes=max_nodes,
            full_pages=self._full.num_tree_pages,
            swa_pages=0 if self._swa is None else self._swa.num_tree_pages,
        )

    def dump(self) -> list[tuple[str, list[int], list[bool]]]:
        """Every root-to-leaf prefix as (namespace, tokens, SWA live per page); for tests."""
        found = []
        for namespace, root in self._tree.roots.items():
            for leaf in self._tree.leaves(root):
                path = list(reversed(list(leaf.up_to_root())))
                tokens = [int(token) for node in path for token in node.tokens]
                live = [bool(page) for node in path for page in node.swa.pages]
                found.append((namespace, tokens, live))
        return found
