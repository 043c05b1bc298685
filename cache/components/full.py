"""Full-attention state in the tree: every node holds all its pages, so any shared prefix is reusable."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.cache.audit import AuditError
from forkpoint.cache.pages import PageIds, PagePool
from forkpoint.cache.tree import Node


class FullComponent:
    """Full pages of the tree. A node is pinned while it lies on the path of a lease."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._num_tree_pages = 0
        self._num_pinned_pages = 0

    @property
    def num_tree_pages(self) -> int:
        return self._num_tree_pages

    @property
    def num_locked_pages(self) -> int:
        return self._num_pinned_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._num_tree_pages - self._num_pinned_pages

    @property
    def num_available_pages(self) -> int:
        return self.pool.num_free + self._num_tree_pages - self._num_pinned_pages

    def reusable(self, path: Sequence[Node], num_pages: int) -> int:
        """All of it: a node cannot be without its full pages."""
        return num_pages

    def adopt(self, node: Node) -> None:
        """The tree now owns the full pages of a new node without pins."""
        self._num_tree_pages += node.num_pages

    def keep_tree_copy(self, own: PageIds, tree_pages: PageIds) -> None:
        """Free a lease's pages whose content the tree has; `own` names the tree's pages afterwards."""
        self.pool.give(own)
        own[:] = tree_pages

    def pin(self, node: Node) -> None:
        """Protect the path to `node` from eviction. O(1) once an ancestor is pinned."""
        step: Node | None = node
        while step is not None:
            step.pins += 1
            if step.pins > 1:
                return
            self._num_pinned_pages += len(step.full_pages)
            step = step.parent

    def unpin(self, node: Node) -> None:
        """Undo one pin."""
        step: Node | None = node
        while step is not None:
            assert step.pins > 0
            step.pins -= 1
            if step.pins:
                return
            self._num_pinned_pages -= len(step.full_pages)
            step = step.parent

    def drop(self, node: Node) -> None:
        self._num_tree_pages -= node.num_pages
        self.pool.give(node.full_pages)

    def audit(self, nodes: Sequence[Node]) -> None:
        tree = sum(node.num_pages for node in nodes)
        pinned = sum(node.num_pages for node in nodes if node.pins)
        if (tree, pinned) != (self._num_tree_pages, self._num_pinned_pages):
            ledger = (self._num_tree_pages, self._num_pinned_pages)
            raise AuditError(f"full: ledger (tree, pinned) {ledger}, recount {(tree, pinned)}")
