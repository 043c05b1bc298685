"""What the cache asks of a kind of attention state; a new kind implements these hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forkpoint.cache.pages import PagePool
from forkpoint.cache.tree import Node


class Component(Protocol):
    """The pages of one kind that the tree holds. Counts are in pages."""

    pool: PagePool

    @property
    def num_tree_pages(self) -> int:
        """Pages that nodes hold, locked ones included."""
        ...

    @property
    def num_evictable_pages(self) -> int:
        """Tree pages that no lease needs: evict() can free all of them."""
        ...

    @property
    def num_available_pages(self) -> int:
        """What an allocation can get: free pages, and tree pages that can be evicted."""
        ...

    def reusable(self, path: Sequence[Node], num_pages: int) -> int:
        """The greatest page index p <= num_pages such that a sequence may resume at p on this path."""
        ...

    def drop(self, node: Node) -> None:
        """The node leaves the tree: free what it holds of this kind."""
        ...
